"""Files that are either whole or not there.

Takes bytes and a path; writes beside the path, forces the bytes to disk and renames. Gives nothing
back. Leaves out locking: one process owns a run folder (see ``folder.py``).
"""

import os
from collections.abc import Iterable
from pathlib import Path

TEMPORARY_SUFFIX = ".part"
"""Ends the name of a file that is being written; a killed writer leaves one such file, the next one replaces it."""


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write ``chunks`` to ``path`` in one visible step; on any error ``path`` keeps what it held.

    Raises:
        OSError: the disk is full or the folder cannot be written; the half-written file is removed.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in ``folder`` to disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
