"""One side's captured values, sequence by sequence, for trials.

Takes a readable side with its points and row tables; gives the rows of one recorded sequence at one point, found by the
digest of their token prefix: a row that a cache or another sample of the group supplied counts as well. Bounded: at most
``MAX_TOKENS`` tokens of all sequences take part, those first that differ most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainfer.check.align.points import Point, Source
from trainfer.check.align.rows import RawTables, TableId
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.values import source_rows
from trainfer.check.dump.digest import prefix_digests
from trainfer.check.dump.reader import DamagedRecordError
from trainfer.check.dump.records import MISSING, Task

MAX_TOKENS = 4096
"""Of all sequences that take part in trials."""

_HELD_SOURCES = 256

Digest = tuple[int, int, int]
"""Weights version, low and high word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedRows:
    """Values of one sequence at one point.

    Axes: T tokens, D features.
    """

    values_TD: Tensor
    """float64; zero where not known."""
    known_T: Tensor
    dtype: str
    """As captured: F32, BF16 ..."""


class SideRows:
    """The rows of one side."""

    def __init__(
        self,
        side: ReadableSide,
        sources: Mapping[Point, Sequence[Source]],
        raw: RawTables,
        labels: Mapping[tuple[int, int], int],
        versions: Mapping[int, int],
    ) -> None:
        """Index the tables.

        Args:
            side: Where values are read.
            sources: What the side has of each point, as joined with the other side.
            raw: Its row tables.
            labels: (rank, executed sequence) -> recorded sequence.
            versions: Its weights versions as numbers that both sides share.
        """
        self.side, self.sources, self.raw = side, sources, raw
        self._places: dict[Digest, list[tuple[TableId, int, int]]] = {}
        self._held: dict[tuple[object, ...], Tensor | None] = {}
        self._found: dict[tuple[int, int, tuple[int, ...]], list[list[tuple[TableId, int]]]] = {}
        for table_id, table in raw.slots.items():
            version = versions.get(raw.versions[table_id], -2 - raw.versions[table_id])
            digests, sequences = table["digest"].tolist(), table["sequence"].tolist()
            for slot in np.flatnonzero(table["position"] != MISSING).tolist():
                key = (version, digests[slot][0], digests[slot][1])
                label = labels.get((table_id[0], int(sequences[slot])), -1)
                self._places.setdefault(key, []).append((table_id, slot, label))

    def places(self, tokens: Sequence[int], label: int, version: int) -> list[list[tuple[TableId, int]]]:
        """For every token of a sequence the (table, slot) that hold its row, those of this sequence first."""
        asked = (label, version, tuple(tokens))
        if asked in self._found:
            return self._found[asked]
        digests = prefix_digests(np.array(tokens, dtype=np.int64)).tolist()
        found: list[list[tuple[TableId, int]]] = []
        for low, high in digests:
            here = self._places.get((version, low, high), [])
            own = [(table, slot) for table, slot, mine in here if mine == label]
            others = [(table, slot) for table, slot, mine in here if mine != label]
            found.append([*own, *others])
        self._found[asked] = found
        return found

    def versions(self, tokens: Sequence[int]) -> list[int]:
        """Versions (shared numbers; below −1: the side's own) under which the whole sequence's first row was run."""
        low, high = prefix_digests(np.array(tokens[:1], dtype=np.int64)).tolist()[0]
        return sorted({version for version, a, b in self._places if (a, b) == (low, high)})

    def captured(self, point: Point, tokens: Sequence[int], label: int, version: int) -> CapturedRows | None:
        """Values of one sequence at a point; None where none of its rows was captured."""
        sources = self.sources.get(point, ())
        by_table = {(source.rank, source.table): source for source in sources}
        if not by_table or sources[0].first.task is not Task.TENSOR:
            return None
        values: Tensor | None = None
        known = torch.zeros(len(tokens), dtype=torch.bool)
        for place, candidates in enumerate(self.places(tokens, label, version)):
            for table, slot in candidates:
                rows = self.rows(by_table[table]) if table in by_table else None
                if rows is None or slot >= len(rows):
                    continue
                if values is None:
                    values = torch.zeros(len(tokens), rows.shape[1], dtype=torch.float64)
                if rows.shape[1] == values.shape[1]:
                    values[place] = rows[slot].double()
                    known[place] = True
                    break
        if values is None:
            return None
        return CapturedRows(values_TD=values, known_T=known, dtype=sources[0].first.dtype)

    def rows(self, source: Source) -> Tensor | None:
        """All slots of one source; None where they cannot be read."""
        # Queries, keys and values of a fused projection are columns of one record.
        key = (source.rank, source.table, tuple(r.id for r in source.records), source.ranks, source.columns)
        if key not in self._held:
            while len(self._held) >= _HELD_SOURCES:
                self._held.pop(next(iter(self._held)))
            try:
                self._held[key] = source_rows(self.side, source)
            except DamagedRecordError:
                self._held[key] = None
        return self._held[key]
