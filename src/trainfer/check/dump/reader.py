"""Reads a dump that may be unfinished, damaged or hostile.

Takes a folder; gives its records one by one and the bytes of each on demand, verified. No torch (see
``tensors`` for that), no pickle, nothing executed; memory is bounded by one line and one tensor. What
cannot be read is named in ``Dump.problems`` or by the error of the one record that it concerns.
"""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np

from trainfer.check.dump.checksum import checksum
from trainfer.check.dump.folder import open_plain_file, open_shard, rank_folder, read_manifests
from trainfer.check.dump.lines import decode_lines
from trainfer.check.dump.records import (
    MISSING,
    Blob,
    CallRecord,
    IndexRecord,
    Manifest,
    ProblemRecord,
    RowsRecord,
    SequenceRecord,
    TensorRecord,
    WeightRecord,
)
from trainfer.check.dump.shard import DATA_START
from trainfer.errors import DumpError

T = TypeVar("T")

ROW_TYPE = np.dtype([("digest", "<u8", (2,)), ("sequence", "<i4"), ("position", "<i4"), ("token", "<i4")])
"""One slot of a row table. ``sequence`` and ``position`` are ``MISSING`` where it holds no row."""

_INDEX = msgspec.json.Decoder(IndexRecord)
_TOKENS = msgspec.json.Decoder(SequenceRecord)
_WEIGHTS = msgspec.json.Decoder(WeightRecord)


class DamagedRecordError(DumpError):
    """One record's bytes are missing, truncated or changed; the other records can still be read."""


class Dump:
    """One side's dump."""

    def __init__(self, folder: Path | str) -> None:
        """Read the manifests.

        Raises:
            DumpError: the folder is no dump, or mixes several.
        """
        self.folder = Path(folder)
        self.manifests: dict[int, Manifest] = read_manifests(self.folder)
        self._problems: dict[str, None] = {}

    @property
    def manifest(self) -> Manifest:
        """The lowest rank's."""
        return next(iter(self.manifests.values()))

    @property
    def side(self) -> str:
        """``rollout`` or ``train``."""
        return self.manifest.side

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that wrote something."""
        return tuple(self.manifests)

    @property
    def complete(self) -> bool:
        """True where every rank of the capture is there, finished and missed nothing."""
        return not self.missing_ranks and all(manifest.complete for manifest in self.manifests.values())

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that should have written and did not."""
        manifest = self.manifest
        expected = range(manifest.world_size) if manifest.ranks is None else manifest.ranks
        return tuple(rank for rank in expected if rank not in self.manifests)

    @property
    def problems(self) -> tuple[str, ...]:
        """Damage met so far, each named once; complete after everything was read."""
        return tuple(self._problems)

    def index(self, rank: int) -> Iterator[IndexRecord]:
        """All records of a rank's index in the order of writing, read lazily."""
        return self._lines(rank, "index.jsonl", _INDEX)

    def tensors(
        self, rank: int, *, keep: Callable[[TensorRecord], bool] | None = None
    ) -> Iterator[TensorRecord]:
        """Tensor records in the order of execution, those that ``keep`` wants."""
        for record in self.index(rank):
            if isinstance(record, TensorRecord) and (keep is None or keep(record)):
                yield record

    def calls(self, rank: int) -> dict[int, CallRecord]:
        """Forward calls by number. A call that a kill cut short has no record."""
        return {record.call: record for record in self.index(rank) if isinstance(record, CallRecord)}

    def row_tables(self, rank: int) -> dict[int, RowsRecord]:
        """Row tables by number; ``rows`` reads one."""
        return {record.table: record for record in self.index(rank) if isinstance(record, RowsRecord)}

    def capture_problems(self, rank: int) -> list[ProblemRecord]:
        """What the capture itself could not store."""
        return [record for record in self.index(rank) if isinstance(record, ProblemRecord)]

    def sequences(self, rank: int) -> Iterator[SequenceRecord]:
        """Recorded sequences with their log-probs."""
        return self._lines(rank, "tokens.jsonl", _TOKENS)

    def weights(self, rank: int) -> Iterator[WeightRecord]:
        """Parameters and buffers by fingerprint, in the model's order, once per weights version."""
        return self._lines(rank, "weights.jsonl", _WEIGHTS)

    def rows(self, rank: int, record: RowsRecord) -> np.ndarray:
        """A row table as an array of ``ROW_TYPE``, one element per slot.

        Raises:
            DamagedRecordError: its bytes are not whole.
        """
        if record.blob is None:
            raise DamagedRecordError(f"row table {record.table} has no bytes")
        data = self.read(rank, record.blob)
        if len(data) != record.slots * ROW_TYPE.itemsize:
            raise DamagedRecordError(
                f"row table {record.table} has {len(data)} bytes for {record.slots} slots"
            )
        return np.frombuffer(data, dtype=ROW_TYPE)

    def read(self, rank: int, blob: Blob) -> memoryview:
        """The bytes of a blob, whole and verified.

        Raises:
            DamagedRecordError: missing, truncated, changed, or not a shard at all.
        """
        data = self._with_shard(rank, blob, _read_blob)
        found = checksum(data)
        if found != blob.checksum:
            raise DamagedRecordError(
                f"{blob.shard}, bytes {blob.offset} to {blob.offset + blob.nbytes}: checksum {found}, "
                f"the index says {blob.checksum}; the file was changed"
            )
        return data

    def check(self, rank: int, blob: Blob) -> None:
        """Look whether a blob lies within its shard, without reading it.

        Raises:
            DamagedRecordError: missing, truncated, or not a shard at all.
        """
        self._with_shard(rank, blob, _check_blob)

    def _with_shard(self, rank: int, blob: Blob, action: Callable[[BinaryIO, Blob], T]) -> T:
        try:
            with open_shard(rank_folder(self.folder, rank), blob.shard) as file:
                return action(file, blob)
        except DamagedRecordError:
            raise
        except (DumpError, OSError) as error:
            raise DamagedRecordError(str(error)) from error

    def _lines(self, rank: int, name: str, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
        path = rank_folder(self.folder, rank) / name
        try:
            file = open_plain_file(path)
        except (OSError, DumpError) as error:
            self._note(f"rank {rank}: {name} cannot be read: {error}")
            return
        with file:
            for record in decode_lines(file, decoder):
                if isinstance(record, str):
                    self._note(f"rank {rank}: {name}, {record}")
                else:
                    yield record

    def _note(self, problem: str) -> None:
        self._problems[problem] = None


def _check_blob(file: BinaryIO, blob: Blob) -> None:
    _refuse_foreign(file.read(9), blob.shard)
    size = file.seek(0, 2)
    if blob.nbytes < 0 or blob.offset < DATA_START or blob.offset + blob.nbytes > size:
        raise DamagedRecordError(
            f"{blob.shard} ends at byte {size}; the record needs bytes {blob.offset} to "
            f"{blob.offset + blob.nbytes}"
        )


def unset_bytes(size: int) -> memoryview:
    """Room for so many bytes that nothing was written to: clearing it first would cost as much as reading."""
    return np.empty(size, dtype=np.uint8).data


def _read_blob(file: BinaryIO, blob: Blob) -> memoryview:
    _check_blob(file, blob)
    data = unset_bytes(blob.nbytes)
    rest, offset = data, blob.offset
    while rest:
        count = os.preadv(file.fileno(), [rest], offset)
        if not count:
            raise DamagedRecordError(f"{blob.shard} became shorter while it was read")
        rest, offset = rest[count:], offset + count
    return data


def _refuse_foreign(start: bytes, shard: str) -> None:
    """A growing shard starts with zeros, a finished one with the header's length and a brace."""
    if start == bytes(9) or start == struct.pack("<Q", DATA_START - 8) + b"{":
        return
    if start.startswith((b"PK\x03\x04", b"\x80")):
        raise DamagedRecordError(
            f"{shard} is a pickle or torch.save file in place of a shard; trainfer never loads one"
        )
    raise DamagedRecordError(f"{shard} is not a shard of this format; its first bytes are {start!r}")


def is_row(table: np.ndarray) -> np.ndarray:
    """True for the slots of a row table that hold a row."""
    return table["position"] != MISSING
