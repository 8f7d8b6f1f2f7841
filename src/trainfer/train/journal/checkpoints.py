"""checkpoints/global_step_N: written whole, found again, never half believed.

Takes a function that writes a checkpoint's files into a folder; gives the folder under its final name, or
the newest checkpoint that can be believed. A checkpoint is believed when ``complete.json`` is there and
every file it lists has its size and SHA-256. Knows nothing of tensors (``train.update.checkpoint``).

- Saving: files go to ``.saving-global_step_N``, ``complete.json`` last, everything is forced to disk, then
  one rename makes it visible. A process killed at any moment leaves the older checkpoints untouched.
- Removing (``keep``): renamed to ``.removing-global_step_N`` first, so that a kill leaves no half checkpoint.
- Left-overs of killed processes are removed only below these two name patterns and only when they hold the
  owner's mark; the run folder's lock guarantees that nobody is writing them.
- A checkpoint of a later step than the one being saved belongs to a future that was given up (it is damaged,
  or the user resumed from an earlier one): it is renamed to ``set_aside-global_step_N-K``, never removed.
- A failed save (full disk) removes its own files and keeps every older checkpoint. ``required=False`` turns
  it into a warning: training goes on, and a crash costs the steps since the last checkpoint that fitted.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainfer.errors import CheckpointError
from trainfer.train.journal.atomic import sync_folder, write_atomically

logger = logging.getLogger(__name__)

COMPLETE_FILE = "complete.json"
SCHEMA = "trainfer.checkpoint/1"
OWNER_FILE = ".trainfer"
"""Marks a folder in the making as ours."""
_NAME = re.compile(r"global_step_(\d{1,12})")
_MAX_MARKER_BYTES = 64_000_000
_HASH_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that was not believed."""

    folder: Path
    reason: str
    """Names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """The newest checkpoint that can be believed, and the newer ones that cannot."""

    step: int
    folder: Path
    skipped: tuple[SkippedCheckpoint, ...]


class CheckpointStore:
    """The folder ``checkpoints/`` of one run."""

    def __init__(self, folder: Path, *, keep: int | None) -> None:
        """``keep``: how many complete checkpoints stay (None: all; verl's ``max_actor_ckpt_to_keep``)."""
        assert keep is None or keep >= 1
        self.folder = folder
        self.keep = keep

    def save(self, step: int, write: Callable[[Path], None], *, required: bool) -> Path | None:
        """Call ``write`` with an empty folder, then publish it as ``global_step_N``.

        Returns:
            The published folder; None when saving failed and ``required`` is False.

        Raises:
            CheckpointError: saving failed and ``required`` is True. Older checkpoints are untouched.
        """
        temporary: Path | None = None
        try:
            temporary = self.prepare(step)
            write(temporary)
            return self.publish(step, temporary)
        except (OSError, CheckpointError) as error:
            if temporary is not None:
                self.abandon(temporary)
            self.tell_failure(step, error, required=required)
            return None
        except BaseException:
            if temporary is not None:
                self.abandon(temporary)
            raise

    def prepare(self, step: int) -> Path:
        """An empty folder in the making, for ``publish`` or ``abandon``.

        Raises:
            CheckpointError, OSError: it cannot be made.
        """
        temporary = self.folder / f".saving-global_step_{step}"
        self.folder.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            if not _is_ours(temporary):
                raise CheckpointError(f"{temporary} is in the way and was not made by trainfer; move it")
            shutil.rmtree(temporary)
        temporary.mkdir()
        (temporary / OWNER_FILE).touch()
        return temporary

    def publish(self, step: int, temporary: Path) -> Path:
        """Give a folder whose files are all written its final name; then let old ones go.

        Raises:
            OSError: a digest or the marker cannot be written.
        """
        final = self.folder / f"global_step_{step}"
        _write_marker(temporary, step)
        if final.exists():
            self._set_aside(final)
        self.set_aside_after(step)
        temporary.rename(final)
        sync_folder(self.folder)
        self._prune()
        return final

    def abandon(self, temporary: Path) -> None:
        """Remove a folder in the making."""
        shutil.rmtree(temporary, ignore_errors=True)

    def tell_failure(self, step: int, error: Exception, *, required: bool) -> None:
        """Say that a save failed.

        Raises:
            CheckpointError: ``required`` is True.
        """
        message = (
            f"The checkpoint of step {step} was not written: {error}. {_free_space(self.folder)} "
            "The older checkpoints are untouched. Free space, keep fewer (trainer.max_actor_ckpt_to_keep) "
            "or save less often (trainer.save_freq)."
        )
        if required:
            raise CheckpointError(message) from error
        logger.warning("%s Training goes on.", message)

    def newest(self) -> FoundCheckpoint | None:
        """The newest checkpoint whose every file is as it was written; None when there is none.

        Newer ones that are damaged are named in a warning each and left where they are.
        """
        skipped: list[SkippedCheckpoint] = []
        for step, folder in reversed(list_checkpoints(self.folder)):
            reason = why_damaged(folder)
            if reason is None:
                return FoundCheckpoint(step=step, folder=folder, skipped=tuple(skipped))
            logger.warning("Checkpoint %s is damaged (%s); trying the one before it.", folder, reason)
            skipped.append(SkippedCheckpoint(folder=folder, reason=reason))
        if skipped:
            logger.warning("No checkpoint in %s is whole; the run starts at step 0.", self.folder)
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints of steps after ``step``: they belong to a future that was given up."""
        for later, folder in list_checkpoints(self.folder):
            if later > step:
                self._set_aside(folder)

    def remove_leftovers(self) -> None:
        """Remove what killed processes left half written or half removed, if it is ours."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            prefix, _, name = path.name.partition("-")
            if prefix not in (".saving", ".removing") or not _NAME.fullmatch(name) or not _is_ours(path):
                continue
            shutil.rmtree(path)

    def _set_aside(self, folder: Path) -> None:
        number = 1
        while (target := folder.with_name(f"set_aside-{folder.name}-{number}")).exists():
            number += 1
        folder.rename(target)
        logger.warning(
            "Checkpoint %s is not part of this run's course any more; renamed to %s.", folder, target.name
        )

    def _prune(self) -> None:
        if self.keep is None:
            return
        ours = [folder for _, folder in list_checkpoints(self.folder) if (folder / COMPLETE_FILE).is_file()]
        for folder in ours[: -self.keep]:
            doomed = folder.with_name(f".removing-{folder.name}")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every ``global_step_N``, oldest first, whole or not."""
    if not folder.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def why_damaged(folder: Path) -> str | None:
    """None when every listed file is there with its size and SHA-256, else the first fault in words."""
    marker = folder / COMPLETE_FILE
    try:
        if marker.stat().st_size > _MAX_MARKER_BYTES:
            return f"{COMPLETE_FILE} is too large"
        listed = _listed_files(json.loads(marker.read_bytes()))
    except FileNotFoundError:
        return f"{COMPLETE_FILE} is missing: the save did not finish"
    except (OSError, ValueError, RecursionError) as error:
        return f"{COMPLETE_FILE} cannot be read: {error}"
    if listed is None:
        return f"{COMPLETE_FILE} is not of the form {SCHEMA}"
    return _first_changed(folder, listed)


def _first_changed(folder: Path, listed: dict[str, tuple[int, str]]) -> str | None:
    """Sizes first: they cost nothing."""
    for name, (size, _) in listed.items():
        path = folder / name
        if not path.is_file() or path.is_symlink():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    try:
        digests = _digests(folder, list(listed))
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    for name, (_, digest) in listed.items():
        if digests[name] != digest:
            return f"{name} has changed since it was written: its SHA-256 differs"
    return None


def _listed_files(marker: object) -> dict[str, tuple[int, str]] | None:
    """Name -> (bytes, SHA-256); None when the marker is not ours or a name leaves the folder."""
    if (
        not isinstance(marker, dict)
        or marker.get("schema") != SCHEMA
        or not isinstance(marker.get("files"), dict)
    ):
        return None
    listed: dict[str, tuple[int, str]] = {}
    for name, entry in marker["files"].items():
        if not isinstance(entry, dict) or Path(name).is_absolute() or ".." in Path(name).parts:
            return None
        size, digest = entry.get("bytes"), entry.get("sha256")
        if not isinstance(size, int) or not isinstance(digest, str):
            return None
        listed[name] = (size, digest)
    return listed or None


def _write_marker(folder: Path, step: int) -> None:
    """Force every file to disk, then write ``complete.json`` over them."""
    names = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != OWNER_FILE
    )
    for name in names:
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    digests = _digests(folder, names)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digests[name]} for name in names}
    text = json.dumps({"schema": SCHEMA, "step": step, "files": files}, indent=1)
    for inner in sorted({(folder / name).parent for name in names} - {folder}):
        sync_folder(inner)
    write_atomically(folder / COMPLETE_FILE, [text.encode()])


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashing and reading release the interpreter lock
        return dict(zip(names, pool.map(digest, names), strict=True))


def _is_ours(path: Path) -> bool:
    """A folder with our mark, or one that died before it got its mark (empty)."""
    if not path.is_dir() or path.is_symlink():
        return False
    return (path / OWNER_FILE).is_file() or not any(path.iterdir())


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.2f} GB are free there."
    except OSError:
        return ""
