"""Writes one rank's part of a dump, beside the program that is being watched.

Takes records and the bytes that belong to them; gives files. The caller copies bytes into a buffer
that it reserves here and goes on; a thread takes checksums, appends to shards and then to the index.
The buffers are few and used again: when all are waiting for the disk, ``reserve`` waits too.
What the disk refuses is dropped and told by ``failure``; nothing is raised into the caller.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from trainfer.check.dump.checksum import checksum
from trainfer.check.dump.folder import shard_name
from trainfer.check.dump.lines import encode_line
from trainfer.check.dump.records import Blob, SequenceRecord, WeightRecord
from trainfer.check.dump.shard import ShardTensor, ShardWriter

_FILES = ("index.jsonl", "tokens.jsonl", "weights.jsonl")
_MAX_OPEN_SHARDS = 8
_MAX_ENTRIES = 256
_FLUSH_INTERVAL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterLimits:
    """Sizes in bytes."""

    chunk_bytes: int = 8 * 2**20
    """Of one buffer, small enough that it is still in the cache when the thread reads it; larger tensors get a buffer of
    their own."""
    inflight_bytes: int = 64 * 2**20
    """Of all buffers together, but for a single tensor that is larger by itself."""
    shard_bytes: int = 256 * 2**20
    """A shard is closed when it has grown past this."""


class BlobRef:
    """A place in a shard, known once the thread has written it; None before, and where it failed."""

    __slots__ = ("blob",)

    def __init__(self) -> None:
        self.blob: Blob | None = None


_Entry = tuple[msgspec.Struct | Callable[[], msgspec.Struct], BlobRef | None]
"""A record, or how to make it when its batch is ready; and where its bytes are."""


@dataclass(kw_only=True, slots=True)
class _Part:
    """Bytes of one tensor within a batch's buffer."""

    ref: BlobRef
    tensor: ShardTensor


@dataclass(kw_only=True, slots=True)
class _Batch:
    """What travels to the thread in one piece."""

    step: int
    pass_name: str
    buffer: np.ndarray | None = None
    used: int = 0
    parts: list[_Part] = field(default_factory=list[_Part])
    entries: list[_Entry] = field(default_factory=list[_Entry])
    ready: Callable[[], None] | None = None


class _Buffers:
    """A few buffers that are used again, and a wait when all are away."""

    def __init__(self, limits: WriterLimits, allocate: Callable[[int], np.ndarray]) -> None:
        self._limits = limits
        self._allocate = allocate
        self._free: list[np.ndarray] = []
        self._away_bytes = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> np.ndarray:
        size = max(nbytes, self._limits.chunk_bytes)
        with self._changed:
            self._changed.wait_for(
                lambda: self._away_bytes == 0 or self._away_bytes + size <= self._limits.inflight_bytes
            )
            self._away_bytes += size
            if size == self._limits.chunk_bytes and self._free:
                return self._free.pop()
        return self._allocate(size)

    def give_back(self, buffer: np.ndarray) -> None:
        with self._changed:
            self._away_bytes -= buffer.size
            if buffer.size == self._limits.chunk_bytes:
                self._free.append(buffer)
            self._changed.notify()


class DumpWriter:
    """One rank's files. Calls come from one thread at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: WriterLimits | None = None,
        allocate: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """Open the files below ``folder``, which must exist.

        ``allocate`` makes a buffer of so many bytes (page-locked ones for a GPU).

        Raises:
            OSError: the files cannot be made.
        """
        self._folder = folder
        self._limits = limits or WriterLimits()
        self._buffers = _Buffers(self._limits, allocate or (lambda size: np.empty(size, dtype=np.uint8)))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._files = [os.open(folder / name, flags, 0o644) for name in _FILES]
        self._shards: dict[tuple[int, str], ShardWriter] = {}
        self._numbers: dict[tuple[int, str], int] = {}
        self._batch: _Batch | None = None
        self._ready: Callable[[], None] | None = None
        self._flushed_at = time.monotonic()
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self.failure: str | None = None
        self.bytes_written = 0
        self.bytes_taken = 0
        self._thread = threading.Thread(target=self._work, name="trainfer-dump", daemon=True)
        self._thread.start()

    def reserve(
        self, step: int, pass_name: str, name: str, dtype: str, shape: tuple[int, ...], nbytes: int
    ) -> tuple[np.ndarray, BlobRef]:
        """Room for one tensor's bytes, to be filled before the next call; waits while the disk is behind.

        ``name`` is the tensor's name in the shard, unique per rank.
        """
        batch = self._batch_for(step, pass_name)
        if batch.buffer is not None and batch.used + nbytes > batch.buffer.size:
            self.flush()
            batch = self._batch_for(step, pass_name)
        if batch.buffer is None:
            batch.buffer = self._buffers.take(nbytes)
        self.bytes_taken += nbytes
        start = batch.used
        batch.used += nbytes
        ref = BlobRef()
        batch.parts.append(
            _Part(
                ref=ref, tensor=ShardTensor(name=name, dtype=dtype, shape=shape, start=start, nbytes=nbytes)
            )
        )
        return batch.buffer[start : batch.used], ref

    def put(self, step: int, pass_name: str, record: msgspec.Struct, ref: BlobRef | None = None) -> None:
        """Append a record; with ``ref`` its ``blob`` is filled in, or it is dropped where the bytes were."""
        batch = self._batch_for(step, pass_name)
        batch.entries.append((record, ref))
        if len(batch.entries) >= _MAX_ENTRIES:
            self.flush()

    def put_later(self, step: int, pass_name: str, make: Callable[[], msgspec.Struct]) -> None:
        """As ``put``, for a record that can only be made when what was reserved is ready."""
        self._batch_for(step, pass_name).entries.append((make, None))

    def when_ready(self, wait: Callable[[], None]) -> None:
        """Called by the thread before it reads what was reserved since the last flush (copies from a GPU)."""
        self._ready = wait

    def flush(self) -> None:
        """Hand everything so far to the thread."""
        if self._batch is not None:
            self._batch.ready, self._ready = self._ready, None
            self._queue.put(self._batch)
            self._batch = None
            self._flushed_at = time.monotonic()

    def flush_soon(self) -> None:
        """As ``flush``, but not more than some times a second."""
        if time.monotonic() - self._flushed_at > _FLUSH_INTERVAL_S:
            self.flush()

    def close(self) -> None:
        """Write the rest and end the thread; ``failure`` says whether all of it arrived."""
        self.flush()
        self._queue.put(None)
        self._thread.join()

    def _batch_for(self, step: int, pass_name: str) -> _Batch:
        batch = self._batch
        if batch is not None and (batch.step != step or batch.pass_name != pass_name):
            self.flush()
            batch = None
        if batch is None:
            batch = self._batch = _Batch(step=step, pass_name=pass_name)
        return batch

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self.failure is None:
                try:
                    self._write(batch)
                except OSError as error:
                    self._fail(error)
            if batch.buffer is not None:
                self._buffers.give_back(batch.buffer)
        for shard in self._shards.values():
            self._close_shard(shard)
        for file in self._files:
            os.close(file)

    def _fail(self, error: OSError) -> None:
        self.failure = (
            f"{self._folder} cannot be written any more ({error.strerror}); what follows was not dumped"
        )

    def _close_shard(self, shard: ShardWriter) -> None:
        try:
            shard.close()
        except OSError as error:
            self._fail(error)

    def _write(self, batch: _Batch) -> None:
        if batch.ready is not None:
            batch.ready()
        refused = self._write_parts(batch) if batch.parts else None
        lines: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
        for bare, ref in batch.entries:
            if ref is not None and ref.blob is None:
                continue
            record = bare if isinstance(bare, msgspec.Struct) else bare()
            if ref is not None:
                record = msgspec.structs.replace(record, blob=ref.blob)
            stream = 1 if isinstance(record, SequenceRecord) else 2 if isinstance(record, WeightRecord) else 0
            lines[stream].append(encode_line(record))
        for file, chunk in zip(self._files, lines, strict=True):
            if chunk:
                self._append_lines(file, b"".join(chunk))
        if refused is not None:
            raise refused

    def _append_lines(self, file: int, data: bytes) -> None:
        """All or nothing, as far as the disk lets us: a torn line would hide the ones after it."""
        end = os.fstat(file).st_size
        done = 0
        try:
            while done < len(data):
                done += os.write(file, data[done:])
        except OSError:
            whole = data.rfind(b"\n", 0, done) + 1
            os.ftruncate(file, end + whole)
            raise
        self.bytes_written += len(data)

    def _write_parts(self, batch: _Batch) -> OSError | None:
        """Append a batch's bytes and fill in where they are; gives the error where the disk took only a part."""
        assert batch.buffer is not None
        tensors = [part.tensor for part in batch.parts]
        shard, name = self._shard_for((batch.step, batch.pass_name), tensors)
        data = batch.buffer.data[: batch.used]
        start, refused = shard.end, None
        try:
            shard.append(data, tensors)
        except OSError as error:
            refused = error
        self.bytes_written += shard.end - start
        for part in batch.parts:
            first, nbytes = part.tensor.start, part.tensor.nbytes
            if start + first + nbytes <= shard.end:
                part.ref.blob = Blob(
                    shard=name,
                    offset=start + first,
                    nbytes=nbytes,
                    checksum=checksum(data[first : first + nbytes]),
                )
        return refused

    def _shard_for(self, key: tuple[int, str], tensors: list[ShardTensor]) -> tuple[ShardWriter, str]:
        shard = self._shards.pop(key, None)
        if shard is not None and (shard.end > self._limits.shard_bytes or not shard.has_room(tensors)):
            shard.close()
            shard = None
        if shard is None:
            while len(self._shards) >= _MAX_OPEN_SHARDS:
                self._shards.pop(next(iter(self._shards))).close()
            self._numbers[key] = self._numbers.get(key, -1) + 1
            shard = ShardWriter(self._folder / shard_name(*key, self._numbers[key]))
        self._shards[key] = shard
        return shard, shard_name(*key, self._numbers[key])
