"""One shard: a safetensors file that grows.

Takes runs of bytes with the tensors in them; gives their offsets. The first 64 KiB are kept for the
header, so data is only ever appended; ``close`` writes the header, and from then on any safetensors
library reads the file. Before that, the index alone says where the whole records are.
"""

import os
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainfer.check.dump.records import SCHEMA

DATA_START = 64 * 1024
"""Offset of the first byte of data in every shard."""
_ENTRY_SLACK = 128
"""Bytes of a header entry beside its name and shape."""


class ShardTensor(NamedTuple):
    """What a header says of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """From the start of the run that it came in."""
    nbytes: int


class ShardWriter:
    """Appends to one shard; not thread-safe."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._header: dict[str, dict[str, object]] = {}
        self._header_bytes = _ENTRY_SLACK
        self.end = DATA_START

    def has_room(self, tensors: list[ShardTensor]) -> bool:
        """True while the header can name these too."""
        return self._header_bytes + sum(map(_entry_bytes, tensors)) <= DATA_START - 8

    def append(self, data: memoryview, tensors: list[ShardTensor]) -> int:
        """Write a run of bytes; gives its offset in the file.

        Raises:
            OSError: the disk took only a part; the tensors that lie in it whole are kept, up to ``end``.
        """
        start = offset = self.end
        try:
            while data:
                written = os.pwrite(self._file, data, offset)
                data = data[written:]
                offset += written
        except OSError:
            tensors = [tensor for tensor in tensors if start + tensor.start + tensor.nbytes <= offset]
            offset = max((start + tensor.start + tensor.nbytes for tensor in tensors), default=start)
            os.ftruncate(self._file, offset)
            self._enter(tensors, start, offset)
            raise
        self._enter(tensors, start, offset)
        return start

    def _enter(self, tensors: list[ShardTensor], start: int, end: int) -> None:
        for tensor in tensors:
            first = start + tensor.start - DATA_START
            self._header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (first, first + tensor.nbytes),
            }
            self._header_bytes += _entry_bytes(tensor)
        self.end = end

    def close(self) -> None:
        """Write the header; a file with no whole run in it is removed.

        Raises:
            OSError: the header could not be written; the data stays readable through the index.
        """
        try:
            os.ftruncate(self._file, self.end)
            header = msgspec.json.encode({"__metadata__": {"schema": SCHEMA}, **self._header})
            size = DATA_START - 8
            assert len(header) <= size
            os.pwrite(self._file, struct.pack("<Q", size) + header.ljust(size), 0)
        finally:
            os.close(self._file)
        if not self._header:
            self._path.unlink()


def _entry_bytes(tensor: ShardTensor) -> int:
    return _ENTRY_SLACK + len(tensor.name) + 20 * len(tensor.shape)
