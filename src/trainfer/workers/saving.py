"""Checkpoints of a run: now, or behind the training (``actor.checkpoint.async_save``).

Takes the journal's store and the workers; gives the folder of each checkpoint once it is whole. Before a save begins, everything
up to its step is on disk: no checkpoint is ever ahead of its metrics.
"""

import json
from collections.abc import Callable
from pathlib import Path

from trainfer.errors import CheckpointError
from trainfer.train.journal.background import BackgroundSaves
from trainfer.train.journal.checkpoints import CheckpointStore
from trainfer.train.journal.metrics import MetricsLog
from trainfer.train.update.kl_control import KlControl
from trainfer.workers.group import WorkerGroup

KL_FILE = "kl_control.json"


class Saving:
    """The checkpoints of one start of a run."""

    def __init__(
        self,
        store: CheckpointStore,
        metrics: MetricsLog,
        group: WorkerGroup,
        kl_control: KlControl,
        *,
        in_background: bool,
    ) -> None:
        """``kl_control``: its present weight goes into every checkpoint."""
        self._store = store
        self._metrics = metrics
        self._group = group
        self._kl_control = kl_control
        self._background = BackgroundSaves(store) if in_background else None

    def save(self, step: int, *, required: bool) -> Path | None:
        """Write the checkpoint of ``step``, or begin to; the newest that has come to be whole meanwhile.

        A save that is ``required`` (the last one) is waited for.

        Raises:
            CheckpointError: it failed, and is required. Otherwise a failure is a warning.
        """
        self._metrics.sync()
        if self._background is None:
            return self._store.save(step, self._with_kl(self._group.save_checkpoint), required=required)
        begin = self._with_kl(self._group.begin_checkpoint)
        earlier = self._background.begin(step, begin, self._group.checkpoint_is_written)
        if not required:
            return earlier
        if self._background.is_idle:  # it could not even begin: once more, for the error that this is
            return self._store.save(step, self._with_kl(self._group.save_checkpoint), required=True)
        return self._background.finish(required=True)

    def poll(self) -> Path | None:
        """The checkpoint that has come to be whole since the last call, if one has."""
        return None if self._background is None else self._background.poll()

    def close(self, *, in_order: bool) -> None:
        """End; a save that is under way is finished where the run ends ``in_order``, and given up otherwise.

        After a failure ranks may be in the middle of something and cannot be asked.
        """
        if self._background is not None:
            if in_order:
                self._background.finish(required=False)
            self._background.close()

    def _with_kl(self, write: Callable[[Path], None]) -> Callable[[Path], None]:
        def write_all(folder: Path) -> None:
            write(folder)
            text = json.dumps({"weight": self._kl_control.weight}) + "\n"
            (folder / KL_FILE).write_text(text, encoding="utf-8")

        return write_all if self._kl_control.is_adaptive else write


def restore_kl_control(control: KlControl, checkpoint: Path) -> None:
    """Let an adaptive weight go on where a checkpoint left it.

    Raises:
        CheckpointError: the checkpoint has no such weight.
    """
    if not control.is_adaptive:
        return
    path = checkpoint / KL_FILE
    try:
        weight = float(json.loads(path.read_text(encoding="utf-8"))["weight"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): it holds the weight of the KL penalty that algorithm.kl_ctrl.type=adaptive has "
            "come to. Resume from another checkpoint, or with type=fixed in another run folder."
        ) from error
    control.restore(weight)
