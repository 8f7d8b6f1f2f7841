"""Response text -> one float. Plain Python, so the public function may stand here."""

from trainfer.train.reward.registry import score as score
