"""A checkpoint that is written while training goes on: at most one, published whole or not at all.

Takes a ``CheckpointStore`` and two functions of the workers: one that begins to write into a folder, and one that says
whether all ranks have written. Once they have, digests and ``complete.json`` are written and the folder is renamed on a thread
of this process. A process that is killed meanwhile leaves a folder ``.saving-global_step_N``, which is never taken for a
checkpoint and goes at the next start. A save that fails (full disk) is told as a save in the foreground is: a warning, and
an error where it was the last one of the run.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainfer.errors import CheckpointError
from trainfer.train.journal.checkpoints import CheckpointStore


class Written(Protocol):
    """Whether every rank has written its part."""

    def __call__(self, *, wait: bool) -> bool:
        """``wait``: come back only when they have.

        Raises:
            CheckpointError: a rank could not write.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnderWay:
    step: int
    folder: Path
    """In the making."""
    written: Written


class BackgroundSaves:
    """The saves of one run."""

    def __init__(self, store: CheckpointStore) -> None:
        """Nothing is under way yet."""
        self._store = store
        self._under_way: _UnderWay | None = None
        self._publishing: Future[Path] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publish")

    @property
    def is_idle(self) -> bool:
        """True when no save is under way."""
        return self._under_way is None

    def begin(self, step: int, start: Callable[[Path], None], written: Written) -> Path | None:
        """Wait for the save before this one, then let the ranks begin theirs; returns what was published meanwhile.

        A failure is a warning.
        """
        earlier = self.finish(required=False)
        folder: Path | None = None
        try:
            folder = self._store.prepare(step)
            start(folder)
        except (OSError, CheckpointError) as error:
            if folder is not None:
                self._store.abandon(folder)
            self._store.tell_failure(step, error, required=False)
        else:
            self._under_way = _UnderWay(step=step, folder=folder, written=written)
        return earlier

    def poll(self) -> Path | None:
        """Move on what is under way, without waiting; the checkpoint that has come to be published, if one has."""
        job = self._under_way
        if job is None:
            return None
        try:
            if self._publishing is None:
                if job.written(wait=False):
                    self._publish(job)
                return None
            return self._ended(self._publishing) if self._publishing.done() else None
        except (OSError, CheckpointError) as error:
            self._failed(job, error, required=False)
            return None

    def finish(self, *, required: bool) -> Path | None:
        """Wait until nothing is under way; the checkpoint, or None where there was none or it failed.

        Raises:
            CheckpointError: it failed, and ``required`` is True.
        """
        job = self._under_way
        if job is None:
            return None
        try:
            if self._publishing is None:
                job.written(wait=True)
                self._publish(job)
            assert self._publishing is not None
            return self._ended(self._publishing)
        except (OSError, CheckpointError) as error:
            self._failed(job, error, required=required)
            return None

    def close(self) -> None:
        """Wait for what this process has in hand; what ranks still write is given up."""
        self._executor.shutdown(wait=True)

    def _publish(self, job: _UnderWay) -> None:
        self._publishing = self._executor.submit(self._store.publish, job.step, job.folder)

    def _ended(self, publishing: Future[Path]) -> Path:
        folder = publishing.result()
        self._under_way = self._publishing = None
        return folder

    def _failed(self, job: _UnderWay, error: OSError | CheckpointError, *, required: bool) -> None:
        if self._publishing is None:
            self._wait_for_the_others(job)
        self._under_way = self._publishing = None
        self._store.abandon(job.folder)
        self._store.tell_failure(job.step, error, required=required)

    def _wait_for_the_others(self, job: _UnderWay) -> None:
        """The folder can go only when no rank writes into it any more."""
        try:
            job.written(wait=True)
        except CheckpointError:
            return  # the first failure has been told
