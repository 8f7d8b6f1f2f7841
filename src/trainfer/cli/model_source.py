"""What a command line calls "the model": a model folder, a checkpoint, a run folder or a configuration.

Takes a path; gives a folder that Transformers loads, exporting a checkpoint into a scratch folder where need
be. Loads no model itself, and no torch before a checkpoint must be exported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainfer.cli.export import find_checkpoint
from trainfer.config.load import load_config
from trainfer.errors import ModelError
from trainfer.train.journal.checkpoints import list_checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where a model is. Exactly one of the two is set."""

    model_folder: Path | None = None
    checkpoint: Path | None = None
    """A whole training checkpoint ``global_step_N``, every file of it verified."""

    def describe(self) -> str:
        """The path that was found."""
        return str(self.checkpoint or self.model_folder)


def find_model(source: Path, overrides: Sequence[str] = ()) -> ModelSource:
    """What ``source`` means.

    A folder with config.json is a model; another folder is a checkpoint, or a run with its newest checkpoint;
    a file is a configuration: the newest checkpoint of its run folder, or its model where there is none yet.

    Raises:
        ModelError, CheckpointError, ConfigError: it is none of these, or damaged.
    """
    if source.is_dir():
        if (source / "config.json").is_file():
            return ModelSource(model_folder=source)
        return ModelSource(checkpoint=find_checkpoint(source))
    if not source.exists():
        raise ModelError(
            f"{source}: no such file or folder. Give a model folder, a run folder, a checkpoint or a configuration."
        )
    config = load_config(source, overrides).config
    assert config.trainer.default_local_dir is not None, "the schema fills it in"
    run_folder = Path(config.trainer.default_local_dir)
    if list_checkpoints(run_folder / "checkpoints"):
        return ModelSource(checkpoint=find_checkpoint(run_folder))
    if config.actor_rollout_ref.model.path is None:
        raise ModelError(
            f"{source} makes its model on the spot, and {run_folder} holds no checkpoint yet. Train first: trainfer train {source}"
        )
    return ModelSource(model_folder=Path(config.actor_rollout_ref.model.path))


def as_folder(source: ModelSource, scratch: Path) -> Path:
    """A folder that Transformers loads; a checkpoint is exported to a new folder inside ``scratch``."""
    if source.checkpoint is None:
        assert source.model_folder is not None
        return source.model_folder
    from trainfer.train.update.checkpoint_export import write_model_folder

    folder = scratch / "model"
    folder.mkdir()
    write_model_folder(source.checkpoint, folder, dtype=None)
    return folder
