"""Compares captured steps behind the training: a process of its own, at the lowest priority, one at a time.

Takes pairs of dump folders; leaves ``result.json``, ``report.html`` and the tables where it is told, and says what came
out once it has. A process, not a thread: the interpreter's lock and torch's threads stay the training's, and a comparison
that fails, or needs more memory than there is, takes nothing with it. ``python -m trainfer.workers.comparison`` is
that process.
"""

import os
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from trainfer.check.report.captured import RESULT, StepVerdict, read_verdict
from trainfer.errors import TrainferError
from trainfer.integrations.dumps import compare

LOWEST_PRIORITY = 19
LOG = "compare.log"
"""What the comparison printed: its summary, or why it failed."""
_MAX_LOG_BYTES = 20_000
_POLL_SECONDS = 0.05
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Two dumps to compare."""

    step: int
    rollout: Path
    train: Path
    out: Path

    def command(self, model_folder: Path) -> str:
        """How a person does the same."""
        return f"trainfer compare {self.rollout} {self.train} --model {model_folder} --out {self.out}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A comparison that has ended."""

    job: Job
    verdict: StepVerdict | None
    problem: str = ""
    """Why there is no verdict."""


class Comparisons:
    """The jobs of one run."""

    def __init__(self, model_folder: Path) -> None:
        """``model_folder``: its tokenizer gives the report the texts of the tokens."""
        self._model_folder = model_folder
        self._waiting: deque[Job] = deque()
        self._running: tuple[Job, subprocess.Popen[bytes]] | None = None

    @property
    def unfinished(self) -> list[Job]:
        """Jobs that have no result yet."""
        running = [self._running[0]] if self._running is not None else []
        return [*running, *self._waiting]

    def start(self, job: Job) -> None:
        """Compare, after the jobs before it."""
        self._waiting.append(job)

    def poll(self) -> list[Finished]:
        """What has ended since the last look; starts what comes next."""
        ended: list[Finished] = []
        if self._running is not None and self._running[1].poll() is not None:
            job, process = self._running
            self._running = None
            ended.append(_outcome(job, process.returncode))
        while self._running is None and self._waiting:
            job = self._waiting.popleft()
            try:
                self._running = (job, self._launch(job))
            except OSError as error:
                ended.append(Finished(job=job, verdict=None, problem=f"no process: {error.strerror}"))
        return ended

    def wait(self, seconds: float) -> list[Finished]:
        """Everything that ends within so many seconds."""
        until = time.monotonic() + seconds
        ended = self.poll()
        while self._running is not None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            ended += self.poll()
        return ended

    def close(self) -> None:
        """End what still runs."""
        self._waiting.clear()
        running, self._running = self._running, None
        if running is not None:
            running[1].kill()
            running[1].wait()

    def _launch(self, job: Job) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        (job.out / RESULT).unlink(missing_ok=True)
        with (job.out / LOG).open("wb") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "trainfer.workers.comparison",
                    *map(str, (job.rollout, job.train, job.out, self._model_folder)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # an interrupt at the terminal is the training's to handle
            )


def _outcome(job: Job, exit_code: int) -> Finished:
    verdict = read_verdict(job.out, job.step)
    if verdict is not None:
        return Finished(job=job, verdict=verdict)
    try:
        with (job.out / LOG).open("rb") as file:
            words = file.read(_MAX_LOG_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        words = ""
    last = words.splitlines()[-1] if words else f"the process ended with exit code {exit_code}"
    return Finished(job=job, verdict=None, problem=last)


def main(arguments: list[str]) -> int:
    """``ROLLOUT TRAIN OUT MODEL``: the background process."""
    os.nice(LOWEST_PRIORITY)
    torch.set_num_threads(1)
    rollout, train, out, model = arguments
    try:
        result = compare(rollout, train, model=model, replay=False)
        result.write(out)
    except TrainferError as error:
        sys.stdout.write(f"{error}\n")
        return TrainferError.exit_code
    sys.stdout.write(result.summary() + "\n")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
