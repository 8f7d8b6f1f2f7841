"""What to tell when a worker process is gone: its rank, the end of its log, and where the run can go on.

Takes a run folder; gives paths and sentences. Plain files, no process is touched.
"""

import faulthandler
import os
import socket
import sys
import time
from pathlib import Path

from trainfer.errors import WorkerError
from trainfer.train.journal.checkpoints import COMPLETE_FILE, list_checkpoints

LOG_LINES = 15
_LOG_BYTES = 8192


def rank_log(run_folder: Path, rank: int) -> Path:
    """Where a worker's output goes."""
    return run_folder / "logs" / f"rank_{rank}.log"


def send_output_to(path: Path) -> None:
    """From here on this process's output, and the stack of a fatal signal, are appended to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()
    sys.stderr.write(
        f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} process {os.getpid()} on {socket.gethostname()}\n"
    )
    sys.stderr.flush()


def worker_lost(run_folder: Path, rank: int, reason: str) -> WorkerError:
    """The error for a worker that ended."""
    return WorkerError(
        f"the worker of rank {rank} is gone: {reason}\n{_log_tail(rank_log(run_folder, rank))}\n{how_to_go_on(run_folder)}"
    )


def how_to_go_on(run_folder: Path) -> str:
    """Names the newest checkpoint that was finished."""
    whole = [
        folder
        for _, folder in list_checkpoints(run_folder / "checkpoints")
        if (folder / COMPLETE_FILE).is_file()
    ]
    if not whole:
        return (
            "No checkpoint had been written; the same command starts again from step 1 (trainer.save_freq)."
        )
    return f"Last checkpoint: {whole[-1]}. The same command goes on from there."


def _log_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return f"Its log {path} cannot be read here; look on its node."
    lines = text.splitlines()[-LOG_LINES:]
    if not lines:
        return f"Its log {path} is empty."
    return "\n".join([f"End of its log {path}:", *(f"  | {line}" for line in lines)])
