"""Which weights a vLLM model computes with, as records under Transformers' names.

On a CPU vLLM computes with packed copies, everywhere with fused ones; what counts is read back from those (see
``settings.weights_from``). Looked at again only after something was loaded: the counters of parameters tell nothing
where weights are written through ``.data``.
"""

import pkgutil
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from trainfer.check.dump.records import Role, WeightRecord
from trainfer.check.dump.tensors import DTYPE_NAMES
from trainfer.check.dump.writer import DumpWriter
from trainfer.check.probe.sink import UNREADABLE, TensorSink
from trainfer.exact.fingerprint import fingerprint_text


class Piece(Protocol):
    """This worker's part of one tensor; see ``engines.vllm.pieces.Piece``."""

    name: str
    shape: tuple[int, ...]
    region: tuple[int, int, int, int]
    dtype: torch.dtype
    sums: tuple[int, int]


class EffectiveWeights:
    """Weights of one worker's model, written once per version."""

    def __init__(
        self, model: nn.Module, writer: DumpWriter, sink: TensorSink, *, reader: str, rank: int, size: int
    ) -> None:
        self._model, self._writer, self._sink = model, writer, sink
        self._reader, self._rank, self._size = reader, rank, size
        self._pieces: Sequence[Piece] = ()
        self._is_read = False
        self._may_differ = False

    def notice_load(self) -> None:
        """Something was loaded."""
        self._may_differ = True

    @property
    def pending(self) -> bool:
        """True where something was loaded since the last look."""
        return self._may_differ

    def changed(self) -> bool:
        """True where the weights are others than at the last ``write``."""
        if not self._may_differ:
            return False
        self._may_differ = False
        before = [(piece.name, piece.sums) for piece in self._pieces]
        self._read()
        return [(piece.name, piece.sums) for piece in self._pieces] != before

    def write(self, *, step: int, version: int) -> None:
        """Write a record for every parameter, tied ones under each name."""
        if not self._is_read or self._may_differ:
            self._may_differ = False
            self._read()
        for record in self._records(version):
            self._writer.put(step, "weights", record)
        self._writer.flush()

    def _read(self) -> None:
        self._is_read = True
        try:
            with torch.no_grad():
                self._pieces = tuple(pkgutil.resolve_name(self._reader)(self._model))
        except (*UNREADABLE, ImportError, AttributeError, AssertionError) as error:
            self._sink.problem(f"the weights have no fingerprints: {type(error).__name__}: {error}")

    def _records(self, version: int) -> Iterator[WeightRecord]:
        first: dict[tuple[object, ...], str] = {}
        for piece in self._pieces:
            identity = (piece.sums, piece.shape, piece.region, piece.dtype)
            rows, columns = piece.region[1] - piece.region[0], piece.region[3] - piece.region[2]
            tied_to = first.setdefault(identity, piece.name) if piece.name.startswith("lm_head.") else None
            first.setdefault(identity, piece.name)
            text = fingerprint_text(piece.dtype, rows * columns, torch.tensor(piece.sums, dtype=torch.int64))
            yield WeightRecord(
                name=piece.name,
                module=piece.name.rpartition(".")[0],
                role=Role.PARAMETER,
                dtype=DTYPE_NAMES.get(piece.dtype, "unknown"),
                shape=piece.shape,
                fingerprint=text,
                weights_version=version,
                requires_grad=False,
                tied_to=None if tied_to == piece.name else tied_to,
                parts=self._parts(piece),
            )

    def _parts(self, piece: Piece) -> tuple[tuple[int, int, int], ...]:
        """Which share of the whole it is: (dimension, share, shares) where it is one."""
        top, bottom, left, right = piece.region
        whole = (piece.shape[0] if piece.shape else 1, piece.shape[1] if len(piece.shape) > 1 else 1)
        for dim, (begin, end, total) in enumerate(((top, bottom, whole[0]), (left, right, whole[1]))):
            if end - begin == total or self._size == 1:
                continue
            even = total % (end - begin) == 0
            shares = total // (end - begin) if even else self._size
            return ((dim, begin // (end - begin) if even else self._rank, shares),)
        return ()
