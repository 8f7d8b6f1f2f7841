"""Every error that trainfer raises for a mistake that is not its own.

::

    TrainferError             exit code 2: could not do it
    ├── ConfigError           a key, a value or a source of the configuration
    ├── PlanError             batch sizes that do not fit together
    ├── DataError             a data file, a row, a column
    │   └── RewardError       a reward that cannot be given or used; also a ValueError
    ├── ModelError            a model folder or tokenizer
    ├── EngineError           a rollout engine could not be used
    ├── RunFolderError        the run folder cannot be used for this run
    ├── CheckpointError       a checkpoint that cannot be written or read
    ├── WeightSyncError       the rollout's weights are not the actor's
    ├── WorkerError           a worker process failed
    ├── DumpError             a dump folder that cannot be written or read
    └── CaptureError          a capture that cannot do what it was asked

A message holds the offending value, the rule, and the remedy. Each error is built from
its message alone, so that it survives pickling between Ray workers. Our own mistakes are
assertions and are not in this tree.
"""


class TrainferError(Exception):
    """Base of all errors that name a mistake outside trainfer; the CLI prints the message alone."""

    exit_code = 2


class ConfigError(TrainferError):
    """A configuration key, value or source is wrong."""


class PlanError(TrainferError):
    """Batch sizes that do not fit together; the message lists every problem at once."""


class DataError(TrainferError):
    """A data file, row or column is wrong."""


class RewardError(DataError, ValueError):
    """A reward that cannot be given (unknown ``data_source``) or used (NaN, a missing partner)."""


class ModelError(TrainferError):
    """A model folder or tokenizer cannot be used."""


class EngineError(TrainferError):
    """A rollout engine is missing, misconfigured or refused the work."""


class RunFolderError(TrainferError):
    """The run folder cannot be used for this run."""


class CheckpointError(TrainferError):
    """A checkpoint cannot be written, read or exported."""


class WeightSyncError(TrainferError):
    """The rollout engine does not hold the actor's weights."""


class WorkerError(TrainferError):
    """A worker process failed."""


class DumpError(TrainferError):
    """A dump folder cannot be written or read."""


class CaptureError(TrainferError):
    """A capture cannot do what it was asked, or has seen nothing."""
