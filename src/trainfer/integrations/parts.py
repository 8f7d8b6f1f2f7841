"""Several dumps as one side: an engine's activations and a server's sequences, or the engines of several replicas.

Takes a folder whose subfolders are dumps; gives a side with a rank for each part's rank. What belongs together is joined by
token ids and row keys as ever, so the parts need to know nothing of one another.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
from torch import Tensor

from trainfer.check.compare.source import DumpSide
from trainfer.check.dump.folder import LEADER_MANIFEST
from trainfer.check.dump.records import (
    CallRecord,
    Manifest,
    RowsRecord,
    SequenceRecord,
    TensorRecord,
    WeightRecord,
)
from trainfer.errors import DumpError


def part_folders(folder: Path) -> list[Path]:
    """Dumps that lie directly below a folder which is none itself."""
    if (folder / LEADER_MANIFEST).exists():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{LEADER_MANIFEST}"))


class PartsSide:
    """A side made of several dumps."""

    def __init__(self, folder: Path) -> None:
        """Open every part.

        Raises:
            DumpError: there is none, one is damaged, or they are of different sides.
        """
        self._folder = folder
        parts = [DumpSide(path) for path in part_folders(folder)]
        if not parts or len({part.side for part in parts}) > 1:
            raise DumpError(f"{folder} holds no dump, nor dumps of one side below it")
        self._places = [(part, rank) for part in parts for rank in part.ranks]
        self._parts = parts

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def manifest(self) -> Manifest:
        """The first one that saw a model, with what any part lacks."""
        manifests = [manifest for part in self._parts for manifest in part.manifests.values()]
        first = next((manifest for manifest in manifests if manifest.modules), manifests[0])
        reasons = tuple(dict.fromkeys(reason for m in manifests for reason in m.incomplete_reasons))
        whole = all(manifest.complete for manifest in manifests)
        return msgspec.structs.replace(first, complete=whole, incomplete_reasons=reasons)

    @property
    def ranks(self) -> tuple[int, ...]:
        """One for each rank of each part."""
        return tuple(range(len(self._places)))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that a part lacks, under numbers behind all that are there."""
        count = sum(len(part.missing_ranks) for part in self._parts)
        return tuple(range(len(self._places), len(self._places) + count))

    @property
    def problems(self) -> tuple[str, ...]:
        """Damage met so far, in any part."""
        return tuple(problem for part in self._parts for problem in part.problems)

    def tensors(
        self, rank: int, *, keep: Callable[[TensorRecord], bool] | None = None
    ) -> Iterator[TensorRecord]:
        """Tensor records in the order of execution."""
        part, own = self._places[rank]
        return part.tensors(own, keep=keep)

    def calls(self, rank: int) -> Mapping[int, CallRecord]:
        """Forward calls by number."""
        part, own = self._places[rank]
        return part.calls(own)

    def row_tables(self, rank: int) -> Mapping[int, RowsRecord]:
        """Row tables by number."""
        part, own = self._places[rank]
        return part.row_tables(own)

    def rows(self, rank: int, record: RowsRecord) -> np.ndarray:
        """One row table."""
        part, own = self._places[rank]
        return part.rows(own, record)

    def sequences(self, rank: int) -> Iterator[SequenceRecord]:
        """Recorded sequences."""
        part, own = self._places[rank]
        return part.sequences(own)

    def weights(self, rank: int) -> Iterator[WeightRecord]:
        """Fingerprints of parameters and buffers."""
        part, own = self._places[rank]
        return part.weights(own)

    def load(self, rank: int, record: TensorRecord | WeightRecord) -> Tensor:
        """The values of a record."""
        part, own = self._places[rank]
        return part.load(own, record)
