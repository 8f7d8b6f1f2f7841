"""Who runs where: actor, rollout and ref behind one group interface. No arithmetic."""
