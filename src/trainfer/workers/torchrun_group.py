"""Ranks that ``torchrun`` has started: rank 0 drives the run, the others wait for its commands.

Takes the environment that torchrun sets; gives, on rank 0, a ``Transport`` whose own rank is this process, and on the
other ranks a loop that serves it. Commands and answers travel as objects over a gloo group of their own. For clusters
without Ray; the rank itself is the same (``rank.py``).

The output of the other ranks goes to ``RUN/logs/rank_R.log``. A rank that fails leaves its last words in torchrun's store. Ranks may then be waiting for it in a collective for ever, so
rank 0 watches the store and, after a grace, says what happened and ends; torchrun ends the others.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from trainfer.errors import TrainferError, WorkerError
from trainfer.workers.failures import how_to_go_on, rank_log, send_output_to, worker_lost
from trainfer.workers.launched import Launched
from trainfer.workers.rank import Answer_co, Command, Place, RankSetup, RankWorker, join

GRACE_SECONDS = 60.0
"""After a rank has failed, how long the others may take to come out of what they are doing."""
STORE_TIMEOUT = timedelta(seconds=10)
LAST_WORDS = "trainfer/last_words"
_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a command ended on one rank."""

    answer: object = None
    error: TrainferError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A rank's process."""

    host: str
    pid: int

    @classmethod
    def this(cls) -> "Process":
        """The one that asks."""
        return cls(host=socket.gethostname(), pid=os.getpid())

    def has_ended(self) -> bool:
        """False as well where it runs on another node."""
        if self.host != socket.gethostname():
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state == "Z"


class TorchrunTransport:
    """Rank 0's side."""

    def __init__(self, setup: RankSetup, launched: Launched, run_folder: Path) -> None:
        """Meet the other ranks, tell them the setup, load the models.

        Raises:
            TrainferError: what a rank raised.
        """
        self._run_folder = run_folder
        self._num_ranks = launched.num_ranks
        self._processes: list[Process] = []
        signal.signal(signal.SIGTERM, self._ended_by_torchrun)
        self._control = _meet(launched, setup.device_type)
        self._watch = _Watch(launched, self._give_up)
        with self._watch, self._losses_named():
            dist.broadcast_object_list([setup, run_folder], src=0, group=self._control)
            self._processes = [Process.this()] * launched.num_ranks
            dist.gather_object(self._processes[0], self._processes, dst=0, group=self._control)
            self._worker: RankWorker | None = RankWorker(setup, _place(launched))

    def call(self, commands: Sequence[Command[Answer_co]]) -> list[Answer_co]:
        """Give command r to rank r, rank 0 being this process; see ``Transport``."""
        worker = self._worker
        assert worker is not None, "a closed group takes no commands"
        self._watch.next_call()
        with self._watch, self._losses_named():
            dist.scatter_object_list([None], list(commands), src=0, group=self._control)
            outcome = _run(worker, commands[0])
            if outcome.error is not None:
                self._watch.failed(f"rank 0: {outcome.error}")
            outcomes: list[Outcome] = [Outcome()] * self._num_ranks
            dist.gather_object(outcome, outcomes, dst=0, group=self._control)
        for each in outcomes:
            if each.error is not None:
                raise each.error
        return [each.answer for each in outcomes]  # type: ignore[misc]  # a command says what it answers

    def close(self) -> None:
        """End every rank."""
        worker, self._worker = self._worker, None
        if worker is not None and not self._watch.has_failed:
            with self._watch:
                dist.scatter_object_list([None], [None] * self._num_ranks, src=0, group=self._control)
                worker.close()

    def _losses_named(self) -> "_Losses":
        return _Losses(self._lost)

    def _lost(self, error: BaseException) -> WorkerError | None:
        """What to say of a broken collective; None where nobody is gone."""
        words = self._watch.wait_for_words()
        gone = [rank for rank, process in enumerate(self._processes) if process.has_ended()]
        if words is None and not gone and not _is_lost_connection(error):
            return None
        self._watch.failed(words or str(error))
        if gone:
            return worker_lost(self._run_folder, gone[0], words or "its process has ended.")
        return WorkerError(
            f"{words or f'a worker process is gone: {_first_line(error)}'}\n{how_to_go_on(self._run_folder)}"
        )

    def _give_up(self, words: str) -> None:
        """On the watching thread: the main one is in a collective that will not end."""
        print(f"error: {words}\n{how_to_go_on(self._run_folder)}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(TrainferError.exit_code)

    def _ended_by_torchrun(self, _signal: int, _frame: FrameType | None) -> None:
        self._watch.failed("torchrun has ended this run")
        gone = [rank for rank, process in enumerate(self._processes) if process.has_ended()]
        if gone:
            raise worker_lost(self._run_folder, gone[0], "its process has ended.")
        raise WorkerError(
            f"torchrun has ended this run: it was told to, or a process on another node has failed.\n"
            f"{how_to_go_on(self._run_folder)}"
        )


class _Losses:
    """Turns the error of a broken connection into one that says who is gone."""

    def __init__(self, lost: Callable[[BaseException], WorkerError | None]) -> None:
        self._lost = lost

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):  # of which torch's own errors of collectives are kinds
            lost = self._lost(error)
            if lost is not None:
                raise lost from error


class _Watch:
    """Looks for last words while the main thread is inside a command."""

    def __init__(self, launched: Launched, give_up: Callable[[str], None]) -> None:
        self._store = _store(launched)
        self._give_up = give_up
        self._busy = threading.Event()
        self._words: str | None = None
        self._call = 0
        threading.Thread(target=self._look, daemon=True).start()

    @property
    def has_failed(self) -> bool:
        """True when some rank cannot go on."""
        return self._words is not None

    def next_call(self) -> None:
        """Every rank has come out of the last command: what was said of it is of no concern any more."""
        self._call += 1
        self._words = None

    def failed(self, words: str) -> None:
        """This very rank has failed: others may wait for it."""
        self._words = words

    def wait_for_words(self) -> str | None:
        """What the rank that is gone has to say, if it could."""
        for _ in range(10):
            if self._words is not None:
                return self._words
            time.sleep(_POLL_SECONDS / 2)
        return None

    def __enter__(self) -> None:
        self._busy.set()

    def __exit__(self, *exc_info: object) -> None:
        self._busy.clear()

    def _look(self) -> None:
        since: float | None = None
        while True:
            time.sleep(_POLL_SECONDS)
            call = self._call
            if self._words is None:
                try:
                    found = self._store.check([_key(call)])
                    words = self._store.get(_key(call)).decode() if found else None
                except RuntimeError:  # the store is gone: the run is ending
                    return
                if call == self._call:
                    self._words = words
            if self._words is None or not self._busy.is_set():
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > GRACE_SECONDS:
                self._give_up(self._words)


def serve(launched: Launched, device_type: str) -> None:
    """Another rank's side: do what rank 0 says until it says no more."""
    control = _meet(launched, device_type)
    told: list[object] = [None, None]
    dist.broadcast_object_list(told, src=0, group=control)
    setup, run_folder = told
    assert isinstance(setup, RankSetup)
    assert isinstance(run_folder, Path)
    send_output_to(rank_log(run_folder, launched.rank))
    call = 0
    try:
        dist.gather_object(Process.this(), None, dst=0, group=control)
        worker = RankWorker(setup, _place(launched))
        while True:
            command: list[Command[object] | None] = [None]
            dist.scatter_object_list(command, None, src=0, group=control)
            if command[0] is None:
                break
            call += 1
            outcome = _run(worker, command[0])
            if outcome.error is not None:
                _leave_words(launched, call, str(outcome.error))
            dist.gather_object(outcome, None, dst=0, group=control)
        worker.close()
    except BaseException as error:
        _leave_words(launched, call, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        raise


def _run(worker: RankWorker, command: Command[object]) -> Outcome:
    try:
        return Outcome(answer=command.run(worker))
    except TrainferError as error:
        return Outcome(error=error)


def _meet(launched: Launched, device_type: str) -> dist.ProcessGroup:
    """The group in which commands travel, after the one in which ranks compute."""
    join(_place(launched), device_type)
    group = dist.new_group(
        backend="gloo", timeout=timedelta(days=7)
    )  # a command may take as long as it likes
    assert isinstance(group, dist.ProcessGroup)
    return group


def _place(launched: Launched) -> Place:
    return Place(
        rank=launched.rank,
        num_ranks=launched.num_ranks,
        local_device=launched.local_rank if torch.cuda.is_available() else 0,
        meeting="env://",
    )


def _store(launched: Launched) -> TCPStore:
    return TCPStore(
        launched.host, launched.port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False
    )


def _key(call: int) -> str:
    """Calls are counted alike on all ranks; what is said while the group starts belongs to call 0."""
    return f"{LAST_WORDS}/{call}"


def _leave_words(launched: Launched, call: int, words: str) -> None:
    try:
        _store(launched).set(_key(call), f"rank {launched.rank}: {words}")
    except RuntimeError:  # nobody is left to read them
        return


def _is_lost_connection(error: BaseException) -> bool:
    text = str(error)
    return any(
        sign in text for sign in ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "NCCL")
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
