"""What a run leaves behind: run folder -> metrics, rollouts, checkpoints, loggers. Plain Python; no tensors."""
