"""Opens a side for comparison: its records, and its values as tensors.

Takes a folder written by ``trainfer.capture``; gives records (see ``align.side``) and verified tensors. Other
tools' dumps come through their integration as another ``ReadableSide``. No pickle, bounded memory: one tensor.
"""

import os
import threading
import weakref
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trainfer.check.align.side import Side
from trainfer.check.dump.checksum import checksum
from trainfer.check.dump.folder import open_shard, rank_folder
from trainfer.check.dump.reader import Dump, unset_bytes
from trainfer.check.dump.records import Blob, CallRecord, RowsRecord, TensorRecord, WeightRecord
from trainfer.check.dump.shard import DATA_START
from trainfer.check.dump.tensors import load_tensor


class ReadableSide(Side, Protocol):
    """A side whose values can be read."""

    @property
    def name(self) -> str:
        """For messages: where it came from."""
        ...

    def load(self, rank: int, record: TensorRecord | WeightRecord) -> Tensor:
        """The values of a record; raises ``DamagedRecordError``."""
        ...


class DumpSide(Dump):
    """A dump of trainfer's own format. Shards stay open while it lives: thousands of records lie in each."""

    def __init__(self, folder: Path | str) -> None:
        """Read the manifests.

        Raises:
            DumpError: the folder is no dump, or mixes several.
        """
        super().__init__(folder)
        self._shards: dict[tuple[int, str], tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._small: dict[int, tuple[dict[int, CallRecord], dict[int, RowsRecord]]] = {}
        weakref.finalize(self, _close_all, self._shards)

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.folder)

    def calls(self, rank: int) -> dict[int, CallRecord]:
        """As ``Dump.calls``, read once: every stage asks for them, and the whole index has to be read to find them."""
        return self._calls_and_tables(rank)[0]

    def row_tables(self, rank: int) -> dict[int, RowsRecord]:
        """As ``Dump.row_tables``, found in the same reading of the index."""
        return self._calls_and_tables(rank)[1]

    def _calls_and_tables(self, rank: int) -> tuple[dict[int, CallRecord], dict[int, RowsRecord]]:
        if rank not in self._small:
            calls, tables = dict[int, CallRecord](), dict[int, RowsRecord]()
            for record in self.index(rank):
                if isinstance(record, CallRecord):
                    calls[record.call] = record
                elif isinstance(record, RowsRecord):
                    tables[record.table] = record
            self._small[rank] = calls, tables
        return self._small[rank]

    def load(self, rank: int, record: TensorRecord | WeightRecord) -> Tensor:
        """The values of a record.

        Raises:
            DamagedRecordError: its bytes are not whole, or it holds none.
        """
        return load_tensor(self, rank, record)

    def read(self, rank: int, blob: Blob) -> memoryview:
        """As ``Dump.read``, with one copy and one system call for each record.

        Raises:
            DamagedRecordError: missing, truncated, changed, or not a shard at all.
        """
        descriptor, size = self._shard(rank, blob)
        if descriptor < 0 or not DATA_START <= blob.offset <= blob.offset + blob.nbytes <= size:
            return super().read(rank, blob)
        data, done = unset_bytes(blob.nbytes), 0
        while done < blob.nbytes:
            count = os.preadv(descriptor, [data[done:]], blob.offset + done)
            if count == 0:
                return super().read(rank, blob)
            done += count
        if checksum(data) != blob.checksum:
            return super().read(rank, blob)
        return data

    def _shard(self, rank: int, blob: Blob) -> tuple[int, int]:
        """Descriptor and size of a shard, checked when it is opened; −1 once too many are open."""
        key = (rank, blob.shard)
        with self._lock:
            if key not in self._shards:
                if len(self._shards) >= _MAX_OPEN:
                    return -1, 0
                self.check(rank, blob)
                with open_shard(rank_folder(self.folder, rank), blob.shard) as file:
                    descriptor = os.dup(file.fileno())
                self._shards[key] = (descriptor, os.fstat(descriptor).st_size)
            return self._shards[key]


_MAX_OPEN = 256


def _close_all(shards: dict[tuple[int, str], tuple[int, int]]) -> None:
    for descriptor, _ in shards.values():
        os.close(descriptor)
    shards.clear()
