"""The run folder: created or resumed, by one process at a time.

Takes the effective configuration and the plan as text; gives a ``RunFolder`` that says where everything
goes. All mistakes are found before a model is loaded: a folder that cannot be written, a file in the way,
another live process in it, a run with another configuration (``resume.py`` names the keys).

::

    RUN/config.yaml  plan.json          what was asked for
        starts.jsonl                    one object per start: time, host, versions, resumed step
        metrics.jsonl                   one object a step
        rollouts/STEP.jsonl             one object a sequence
        checkpoints/global_step_N/
        tensorboard/
        report.html
        .lock                           held while a process trains here

Leaves out tensors, and what the numbers mean.
"""

import fcntl
import json
import logging
import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainfer.errors import RunFolderError
from trainfer.train.journal.atomic import write_atomically
from trainfer.train.journal.resume import check_same_run

logger = logging.getLogger(__name__)

RESUME_MODES = ("auto", "disable", "resume_path")
LOW_DISK_BYTES = 1_000_000_000
"""Below this much free space a warning is given at the start."""
_REPORTED_PACKAGES = ("trainfer", "torch", "transformers", "numpy", "vllm", "ray")


class RunFolder:
    """The folder of one run, locked by this process until ``close``."""

    def __init__(self, path: Path, lock_descriptor: int, *, existed: bool) -> None:
        """Use ``RunFolder.open``."""
        self.path = path
        self.existed = existed
        """True when an earlier process trained here."""
        self._lock_descriptor = lock_descriptor

    @classmethod
    def open(cls, path: Path, *, config_text: str, plan_json: str, resume_mode: str) -> "RunFolder":
        """Create the folder or take up an existing run, and write ``config.yaml`` and ``plan.json``.

        Args:
            path: ``trainer.default_local_dir``.
            config_text: the effective configuration as YAML; comments (sources) are not compared.
            plan_json: the plan as JSON.
            resume_mode: as in verl. ``auto`` and ``resume_path`` take up an existing run, ``disable``
                refuses a folder that already holds one: nothing is ever overwritten in silence.

        Raises:
            RunFolderError: the folder cannot be used for this run.
        """
        assert resume_mode in RESUME_MODES, resume_mode
        _create(path)
        descriptor = _lock(path)
        try:
            existed = (path / "config.yaml").is_file()
            if existed and _has_steps(path):
                _check_may_resume(path, config_text, resume_mode)
            _warn_if_full(path)
            write_atomically(path / "plan.json", [plan_json.encode()])  # first: marks the folder as a run's
            write_atomically(path / "config.yaml", [config_text.encode()])
        except OSError as error:
            os.close(descriptor)
            raise RunFolderError(
                f"Cannot write in {path}: {error.strerror or error}. Free space there."
            ) from error
        except RunFolderError:
            os.close(descriptor)
            raise
        return cls(path, descriptor, existed=existed)

    @property
    def checkpoints(self) -> Path:
        """Where ``global_step_N`` folders go."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One object a step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One file a step."""
        return self.path / "rollouts"

    @property
    def starts(self) -> Path:
        """One object per start."""
        return self.path / "starts.jsonl"

    def consistency(self, step: int) -> Path:
        """Where the dumps of a captured step go."""
        return self.path / "consistency" / f"step_{step}"

    def record_start(self, *, resumed_step: int, details: Mapping[str, str | int | float]) -> None:
        """Append to ``starts.jsonl``: when, where, with which versions, from which step."""
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "resumed_step": resumed_step,
            "python": platform.python_version(),
            "versions": _versions(),
            **details,
        }
        try:
            with self.starts.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            logger.warning("%s cannot be written (%s).", self.starts, error.strerror)

    def close(self) -> None:
        """Give the folder free for another process."""
        os.close(self._lock_descriptor)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _create(path: Path) -> None:
    remedy = "Give the run another folder: trainer.default_local_dir=FOLDER."
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise RunFolderError(f"The run folder {path} is an existing file. {remedy}") from error
    except NotADirectoryError as error:
        raise RunFolderError(f"The run folder {path} lies below a file. {remedy}") from error
    except OSError as error:
        raise RunFolderError(f"Cannot create the run folder {path}: {error.strerror}. {remedy}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise RunFolderError(f"The run folder {path} cannot be written by this user. {remedy}")
    has_plan, has_config = (path / "plan.json").exists(), (path / "config.yaml").exists()
    if has_config and not has_plan:
        raise RunFolderError(
            f"{path} holds a config.yaml that is not a run's and would be overwritten. {remedy}"
        )
    if not has_config and _has_steps(path):
        raise RunFolderError(
            f"{path} holds steps of a run but no config.yaml: it cannot be told which run this is. {remedy}"
        )


def _check_may_resume(path: Path, config_text: str, resume_mode: str) -> None:
    if resume_mode == "disable":
        raise RunFolderError(
            f"{path} already holds a run and trainer.resume_mode=disable asks for a new one. "
            "Give another trainer.default_local_dir, or remove the folder, or resume (auto)."
        )
    check_same_run(path / "config.yaml", config_text)


def _lock(path: Path) -> int:
    """An exclusive lock that ends with this process, however it ends."""
    lock = path / ".lock"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunFolderError(f"Cannot write {lock}: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
        os.close(descriptor)
        raise RunFolderError(
            f"{path} is in use by another process ({holder or 'starting'}). Wait for it, end it, or give this run "
            "another trainer.default_local_dir."
        ) from error
    except OSError as error:  # some network file systems have no locks
        logger.warning(
            "%s cannot be locked (%s): make sure that no second process trains there.", path, error
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _has_steps(path: Path) -> bool:
    """Something worth keeping is there: a folder whose first start failed early may be used for anything."""
    metrics, checkpoints = path / "metrics.jsonl", path / "checkpoints"
    return (metrics.is_file() and metrics.stat().st_size > 0) or (
        checkpoints.is_dir() and any(checkpoints.iterdir())
    )


def _warn_if_full(path: Path) -> None:
    free = shutil.disk_usage(path).free
    if free < LOW_DISK_BYTES:
        logger.warning(
            "The disk of %s has %.2f GB free, and a new checkpoint is whole before an old one goes (trainer.save_freq, "
            "trainer.max_actor_ckpt_to_keep).",
            path,
            free / 1e9,
        )


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _REPORTED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
