"""What a run leaves behind: run folder, metrics, rollouts."""
