"""The folder of a dump: who may write it, where its files lie, its manifest.

Takes a path and a rank; gives claimed folders and manifests. Knows nothing of tensors.
A folder belongs to one launch: each rank claims its manifest's name once, and nobody twice.
"""

import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from trainfer.check.dump.records import SCHEMA, Manifest
from trainfer.errors import DumpError

LEADER_MANIFEST = "manifest.json"
_RANK_MANIFEST = re.compile(r"manifest-rank(\d{1,6})\.json")
_SHARD_NAME = re.compile(r"step\d{1,18}/[A-Za-z0-9_]{1,64}-\d{4,9}\.safetensors")
_PASS_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_RANKS = 1_000_000
_SPARE_BYTES = 8192
"""Blanks behind the first manifest, so that the last one fits in its place."""


def new_run_id() -> str:
    """Sorts by time, unique without coordination: ``20250131-120000-9f3c2a``."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def resolve_run_folder(path: str | Path, run_id: str) -> Path:
    """Put the run id where the path asks for it with ``{run_id}``."""
    return Path(str(path).replace("{run_id}", run_id))


def is_pass_name(name: str) -> bool:
    """True for what may stand in a file name: letters, digits, underscores, at most 64."""
    return _PASS_NAME.fullmatch(name) is not None


def rank_folder(folder: Path, rank: int) -> Path:
    """Where one rank's files lie."""
    return folder / f"rank{rank}"


def manifest_path(folder: Path, rank: int, *, leader: int) -> Path:
    """``manifest.json`` for the lowest captured rank, ``manifest-rankR.json`` for the others."""
    return folder / (LEADER_MANIFEST if rank == leader else f"manifest-rank{rank}.json")


def shard_name(step: int, pass_name: str, number: int) -> str:
    """Path of a shard below the rank's folder."""
    return f"step{step}/{pass_name}-{number:04d}.safetensors"


def claim(folder: Path, manifest: Manifest, *, leader: int) -> None:
    """Make the folder and write the rank's first manifest.

    Raises:
        DumpError: the folder is in use, or was used by another capture.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = manifest_path(folder, manifest.rank, leader=leader)
    held = rank_folder(folder, manifest.rank)
    if path.exists() or held.exists() or _another_launch(folder, manifest):
        raise DumpError(
            f"{folder} already holds a dump; two captures never share a folder. Name another one, remove it, "
            f"or let every run have its own: {folder / '{run_id}'}"
        )
    held.mkdir()  # fails where another process of this rank was faster
    fresh = path.with_suffix(".new")
    fresh.write_bytes(_encode(manifest) + b" " * _SPARE_BYTES + b"\n")
    fresh.replace(path)  # at once: other ranks look while they claim


def _another_launch(folder: Path, manifest: Manifest) -> bool:
    """True where some rank's manifest belongs to another launch or speaks of other ranks."""
    for path in _manifest_paths(folder):
        other = read_manifest(path)
        if (
            other.launch_id != manifest.launch_id
            or other.world_size != manifest.world_size
            or other.side != manifest.side
        ):
            return True
    return any(folder.glob("*.safetensors"))


def rewrite(folder: Path, manifest: Manifest, *, leader: int) -> None:
    """Replace the rank's manifest as a whole: a reader sees the old or the new one.

    On a full disk it is written over the old one, which was made with some room to spare.

    Raises:
        OSError: neither could be done.
    """
    path = manifest_path(folder, manifest.rank, leader=leader)
    fresh = path.with_suffix(".new")
    data = _encode(manifest)
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        room = path.stat().st_size
        if len(data) > room:
            raise
        with path.open("r+b") as file:
            file.write(data.ljust(room))


def _encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def _manifest_paths(folder: Path) -> list[Path]:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise DumpError(f"{folder} cannot be read as a dump: {error.strerror}") from error
    return [folder / name for name in names if name == LEADER_MANIFEST or _RANK_MANIFEST.fullmatch(name)]


def read_manifest(path: Path) -> Manifest:
    """One manifest.

    Raises:
        DumpError: it is not one, or of a schema that this version does not know.
    """
    try:
        with open_plain_file(path) as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise DumpError(f"{path} is longer than {MAX_MANIFEST_BYTES} bytes and is not read")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DumpError(f"{path} is not the manifest of a dump: {error}") from error
    if manifest.schema != SCHEMA:
        raise DumpError(f"{path} has schema {manifest.schema!r}; this version reads {SCHEMA!r}")
    if not 0 <= manifest.rank < manifest.world_size <= MAX_RANKS:
        raise DumpError(f"{path} speaks of rank {manifest.rank} of {manifest.world_size}, which cannot be")
    return manifest


def read_manifests(folder: Path) -> dict[int, Manifest]:
    """Manifests by rank, of one launch.

    Raises:
        DumpError: there is none, one cannot be read, or they belong to different captures.
    """
    paths = _manifest_paths(folder)
    if not paths:
        raise DumpError(f"{folder} holds no dump: there is no {LEADER_MANIFEST} in it")
    manifests: dict[int, Manifest] = {}
    for path in paths:
        manifest = read_manifest(path)
        if manifest.rank in manifests:
            raise DumpError(f"{folder} has two manifests of rank {manifest.rank}")
        manifests[manifest.rank] = manifest
    launches = {(manifest.launch_id, manifest.side, manifest.world_size) for manifest in manifests.values()}
    if len(launches) > 1:
        raise DumpError(
            f"{folder} mixes {len(launches)} captures (different launch, side or number of ranks): {sorted(launches)}"
        )
    return dict(sorted(manifests.items()))


def open_shard(folder: Path, shard: str) -> BinaryIO:
    """Open a shard that an index names.

    Raises:
        DumpError: the name would leave the folder, or it is not a plain file.
    """
    if not _SHARD_NAME.fullmatch(shard):
        raise DumpError(f"{shard!r} is not the name of a shard and is not opened")
    path = folder / shard
    if path.parent.is_symlink():
        raise DumpError(f"{path.parent} is a symbolic link and is not followed")
    try:
        return open_plain_file(path)
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from error


def open_plain_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; symbolic links, pipes and devices are refused.

    Raises:
        OSError: as ``open``.
        DumpError: it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DumpError(f"{path} is not a regular file and is not read")
    return os.fdopen(descriptor, "rb")
