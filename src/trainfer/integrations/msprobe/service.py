"""What recipes reach into: ``debugger.config``, ``debugger.service``; and the folders that a debugger writes.

Takes paths and numbers; gives claimed folders. A folder that another program wrote is refused.
"""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainfer.check.probe.sink import CaptureWarning
from trainfer.errors import DumpError

_WORK = ".trainfer"
"""Below the dump path: working dumps of captures that are open."""


@dataclass(slots=True)
class LiveConfig:
    """What a program may read and set while the debugger runs, under msProbe's names."""

    dump_path: str


class DebuggerService:
    """msProbe's ``debugger.service``: recipes set ``config.dump_path`` and call ``_reset_status``."""

    def __init__(self, end_dump: Callable[[], None], dump_path: str) -> None:
        self.config = LiveConfig(dump_path)
        self._end_dump = end_dump

    def reset_status(self) -> None:
        """End the dump of this step; the step number stays."""
        self._end_dump()

    _reset_status = reset_status


class StepFolders:
    """Folders of one program."""

    def __init__(self) -> None:
        self._written: set[Path] = set()
        self._num_works = 0

    def claim(self, dump_path: str, step: int, rank: int) -> Path:
        """``DUMP_PATH/step0/rank0``, for a dump that begins; what this program wrote there before is removed.

        Raises:
            DumpError: it holds another program's files.
        """
        folder = Path(dump_path) / f"step{step}" / f"rank{rank}"
        if folder in self._written:
            warnings.warn(
                f"{folder} was written by this program and is written anew, as msProbe does",
                CaptureWarning,
                stacklevel=4,
            )
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir() and any(folder.iterdir()):
            raise DumpError(
                f"{folder} was used before, and files of two runs would mix; name another dump_path or remove it"
            )
        self._written.add(folder)
        return folder

    def unused(self, dump_path: str, step: int) -> Path:
        """``DUMP_PATH/step0``, or ``step0-1`` where that is taken."""
        folder = Path(dump_path) / f"step{step}"
        place = 0
        while folder.exists():
            place += 1
            folder = folder.with_name(f"step{step}-{place}")
        return folder

    def work(self, dump_path: str, step: int, rank: int) -> Path:
        """A fresh folder for a capture's working dump."""
        self._num_works += 1
        return Path(dump_path) / _WORK / f"step{step}-rank{rank}-{self._num_works}"

    def forget_work(self, dump_path: str) -> None:
        """Remove the folder of working dumps where none is left."""
        folder = Path(dump_path) / _WORK
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
