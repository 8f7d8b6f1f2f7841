"""Captured rows by address: which sequence, which position, in which call of which rank.

Takes a side's row tables and sources; gives rows as tensors in any order, and the rows that stand before a row in
its sequence, from whichever call computed them. Holds a bounded number of bytes.
"""
# pyright: standard
# (torch's own types are partial)

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainfer.check.align.points import Source
from trainfer.check.align.rows import RawTables, TableId
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.values import source_rows
from trainfer.check.dump.digest import prefix_digests
from trainfer.check.dump.records import MISSING, SequenceRecord, Task

Ints = NDArray[np.int64]
HELD_BYTES = 256 * 2**20
WHOLE_BYTES = 32 * 2**20
"""A place whose values are no more is read once."""
_LOW_BITS = (1 << 40) - 1


class MissingRowsError(Exception):
    """A value that a replay needs was not captured; the text says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Rows of one side; arrays have one element per row."""

    ranks: Ints
    calls: Ints
    sequences: Ints
    positions: Ints

    def __len__(self) -> int:
        return len(self.ranks)

    def take(self, places: Ints | slice) -> "Addresses":
        """Some of them."""
        return Addresses(
            ranks=self.ranks[places],
            calls=self.calls[places],
            sequences=self.sequences[places],
            positions=self.positions[places],
        )


class _Whole:
    """All captured rows of one place."""

    def __init__(self, calls: Ints, names: Ints, rows: Tensor) -> None:
        self._rows = rows
        self._calls, call_places = np.unique(calls, return_inverse=True)
        self._names, name_places = np.unique(names, return_inverse=True)
        codes = call_places.reshape(-1) * len(self._names) + name_places.reshape(-1)
        self._order = np.argsort(codes, kind="stable")
        self._codes = codes[self._order]
        self.nbytes = rows.nbytes + 40 * len(codes)

    def take(self, wanted: Addresses, what: str) -> Tensor:
        """Rows in the order of the addresses."""
        call = _places(self._calls, wanted.ranks << 40 | wanted.calls)
        name = _places(self._names, wanted.sequences << 32 | wanted.positions)
        if call is not None and name is not None:
            places = _places(self._codes, call * len(self._names) + name)
            if places is not None:
                return self._rows.index_select(0, torch.from_numpy(self._order[places]))
        raise MissingRowsError(f"{what} was not captured for every row")


def _places(known: Ints, wanted: Ints) -> Ints | None:
    """Where each wanted number stands in a sorted array; None where one is not there."""
    if not len(known):
        return None
    places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return places if (known[places] == wanted).all() else None


class SideRows:
    """One side's rows."""

    def __init__(self, side: ReadableSide, raw: RawTables, sequences: Sequence[SequenceRecord]) -> None:
        self.side = side
        self._raw = raw
        self._sorted: dict[TableId, tuple[Ints, Ints]] = {}
        self._held: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()
        self._wholes: OrderedDict[int, _Whole | None] = OrderedDict()
        self._digests: dict[tuple[int, int, int], tuple[int, int, int, int]] | None = None
        self._sequences = sequences
        self._calls: dict[TableId, int] = {
            (rank, number): record.call
            for rank in side.ranks
            for number, record in side.row_tables(rank).items()
        }
        self._every: tuple[np.ndarray, Addresses] | None = None

    def addresses(self, table: TableId, slots: Ints) -> Addresses:
        """Addresses of slots of a table."""
        rows = self._raw.slots[table][slots]
        count = len(slots)
        return Addresses(
            ranks=np.full(count, table[0], dtype=np.int64),
            calls=np.full(count, self._calls[table], dtype=np.int64),
            sequences=rows["sequence"].astype(np.int64),
            positions=rows["position"].astype(np.int64),
        )

    def tokens(self, addresses: Addresses) -> Ints:
        """Token ids of rows; raises where some row is in no table."""
        codes, _, tokens = self._index()
        places = _places(codes, _codes(addresses))
        if places is None:
            raise MissingRowsError("some rows stand in no row table")
        return tokens[places]

    def fetch(self, sources: Mapping[tuple[int, int], Source], addresses: Addresses, what: str) -> Tensor:
        """Rows ``[n, width]`` in the stored dtype, in the order of the addresses.

        Args:
            sources: (rank, call) -> what holds the point's rows in that call; one object per place.
            addresses: The rows.
            what: The point, for messages.

        Raises:
            MissingRowsError: a row of it was not captured.
            DamagedRecordError: its bytes are not whole.
        """
        whole = self._whole(sources, what)
        if whole is not None:
            return whole.take(addresses, what)
        names = addresses.ranks << 40 | addresses.calls
        distinct, inverse = np.unique(names, return_inverse=True)
        result: Tensor | None = None
        for number, name in enumerate(distinct.tolist()):
            source = sources.get((name >> 40, name & _LOW_BITS))
            if source is None:
                raise MissingRowsError(f"{what} was not captured in every call")
            places = np.flatnonzero(inverse.reshape(-1) == number)
            rows = self._values(source, what)
            slots = self._slots(source, addresses.take(places), what)
            if len(slots) and int(slots.max()) >= len(rows):
                raise MissingRowsError(f"{what}: its tensor has fewer rows than its table")
            part = rows.index_select(0, torch.from_numpy(slots))
            if result is None:
                result = part.new_empty((len(addresses), part.shape[1]))
            result[torch.from_numpy(places)] = part.to(result.dtype)
        if result is None:
            raise MissingRowsError(f"{what}: no rows")
        return result

    def _whole(self, sources: Mapping[tuple[int, int], Source], what: str) -> "_Whole | None":
        """All rows of a place in one matrix, where they are few enough."""
        key = id(sources)
        if key not in self._wholes:
            self._wholes[key] = self._gathered(sources, what)
            while len(self._wholes) > 1 and sum(w.nbytes for w in self._wholes.values() if w) > HELD_BYTES:
                self._wholes.popitem(last=False)
        self._wholes.move_to_end(key)
        return self._wholes[key]

    def _gathered(self, sources: Mapping[tuple[int, int], Source], what: str) -> "_Whole | None":
        size = sum(r.blob.nbytes for s in sources.values() for r in s.records if r.blob is not None)
        tables = [(source.rank, source.table) for source in sources.values()]
        if size > WHOLE_BYTES or any(table not in self._raw.slots for table in tables):
            return None
        parts: list[Tensor] = []
        calls: list[Ints] = []
        names: list[Ints] = []
        for (rank, call), source in sources.items():
            rows = self._read(source, what)
            table = self._raw.slots[source.rank, source.table][: len(rows)]
            keep = np.flatnonzero(table["position"] != MISSING)
            calls.append(np.full(len(keep), rank << 40 | call, dtype=np.int64))
            names.append(table["sequence"][keep].astype(np.int64) << 32 | table["position"][keep])
            parts.append(rows if len(keep) == len(rows) else rows.index_select(0, torch.from_numpy(keep)))
        if len({(part.shape[1], part.dtype) for part in parts}) != 1:
            return None
        return _Whole(np.concatenate(calls), np.concatenate(names), torch.cat(parts))

    def _values(self, source: Source, what: str) -> Tensor:
        key = (source.rank, source.op, source.columns, tuple(record.id for record in source.records))
        if key not in self._held:
            self._held[key] = self._read(source, what)
            while len(self._held) > 1 and sum(t.nbytes for t in self._held.values()) > HELD_BYTES:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return self._held[key]

    def _read(self, source: Source, what: str) -> Tensor:
        if source.first.task is not Task.TENSOR:
            raise MissingRowsError(f"of {what} only {source.first.task.value} was captured")
        return source_rows(self.side, source)

    def _slots(self, source: Source, wanted: Addresses, what: str) -> Ints:
        table = (source.rank, source.table)
        if table not in self._raw.slots:
            raise MissingRowsError(f"{what}: its rows are not known")
        if table not in self._sorted:
            rows = self._raw.slots[table]
            codes = rows["sequence"].astype(np.int64) << 32 | rows["position"].astype(np.int64)
            order = np.argsort(codes, kind="stable")
            self._sorted[table] = codes[order], order
        codes, order = self._sorted[table]
        places = _places(codes, wanted.sequences << 32 | wanted.positions)
        if places is None:
            raise MissingRowsError(f"{what} was not captured for every row")
        return order[places]

    def _index(self) -> tuple[Ints, Addresses, Ints]:
        """All rows of the side by (rank, sequence, position): sorted codes, addresses, tokens."""
        if self._every is None:
            self._every = self._build()
        codes_tokens, every = self._every
        return codes_tokens["code"], every, codes_tokens["token"]

    def _build(self) -> tuple[np.ndarray, Addresses]:
        parts: list[tuple[Ints, ...]] = []
        for table, rows in self._raw.slots.items():
            real = rows[rows["position"] != MISSING]
            count = len(real)
            call = self._calls.get(table, MISSING)
            parts.append(
                (
                    np.full(count, table[0], dtype=np.int64),
                    np.full(count, call, dtype=np.int64),
                    real["sequence"].astype(np.int64),
                    real["position"].astype(np.int64),
                    real["token"].astype(np.int64),
                )
            )
        columns = [
            np.concatenate([part[i] for part in parts]) if parts else np.empty(0, np.int64) for i in range(5)
        ]
        every = Addresses(ranks=columns[0], calls=columns[1], sequences=columns[2], positions=columns[3])
        codes = _codes(every)
        _, first = np.unique(codes, return_index=True)
        index = np.empty(len(first), dtype=[("code", np.int64), ("token", np.int64)])
        index["code"], index["token"] = codes[first], columns[4][first]
        return index, every.take(first)

    def sequence_rows(self, rank: int, sequence: int, last: int) -> Addresses:
        """All rows 0 to ``last`` of a sequence, from any call of the same weights version.

        Raises:
            MissingRowsError: some were never computed in the capture, nor by another sequence with the same prefix.
        """
        codes, every, _ = self._index()
        base = _code(rank, sequence, 0)
        start, stop = np.searchsorted(codes, [base, base + last + 1])
        found = every.take(slice(int(start), int(stop)))
        if len(found) == last + 1:
            return found
        return self._with_prefix(found, last)

    def _with_prefix(self, found: Addresses, last: int) -> Addresses:
        """The rows that a cache supplied, from other sequences with the same prefix."""
        if not len(found):
            raise MissingRowsError("a row's own sequence was not captured")
        digests = self._digests_of(found)
        if digests is None:
            raise MissingRowsError(
                "keys and values of earlier rows came from a cache that was filled elsewhere"
            )
        by_digest = self._by_digest()
        have = dict(zip(found.positions.tolist(), range(len(found)), strict=True))
        version = self._version(found, 0)
        columns: list[tuple[int, int, int, int]] = []
        for position in range(last + 1):
            if position in have:
                place = have[position]
                columns.append(_one(found, place))
                continue
            other = by_digest.get((version, *digests[position].tolist()))
            if other is None:
                raise MissingRowsError(f"row {position} of a sequence was never computed in this capture")
            columns.append(other)
        array = np.array(columns, dtype=np.int64)
        return Addresses(ranks=array[:, 0], calls=array[:, 1], sequences=array[:, 2], positions=array[:, 3])

    def _version(self, rows: Addresses, place: int) -> int:
        rank, call = int(rows.ranks[place]), int(rows.calls[place])
        tables = [table for table, number in self._calls.items() if table[0] == rank and number == call]
        return self._raw.versions[tables[0]]

    def _digests_of(self, found: Addresses) -> np.ndarray | None:
        """Digests of every prefix of the recorded sequence that a captured row belongs to."""
        wanted = self._row_digest(found)
        for record in self._sequences:
            digests = prefix_digests(np.array(record.tokens, dtype=np.int64))
            position = int(found.positions[-1])
            if position < len(digests) and tuple(digests[position].tolist()) == wanted:
                return digests
        return None

    def _row_digest(self, found: Addresses) -> tuple[int, ...]:
        rank, call, sequence, position = _one(found, len(found) - 1)
        for table, number in self._calls.items():
            if table[0] == rank and number == call and table in self._raw.slots:
                rows = self._raw.slots[table]
                mine = rows[(rows["sequence"] == sequence) & (rows["position"] == position)]
                if len(mine):
                    return tuple(mine["digest"][0].tolist())
        return ()

    def _by_digest(self) -> dict[tuple[int, int, int], tuple[int, int, int, int]]:
        found = self._digests
        if found is not None:
            return found
        found = self._digests = {}
        for table, rows in self._raw.slots.items():
            version, call = self._raw.versions[table], self._calls[table]
            for row in rows[rows["position"] != MISSING]:
                low, high = row["digest"].tolist()
                address = (table[0], call, int(row["sequence"]), int(row["position"]))
                found.setdefault((version, low, high), address)
        return found


def _one(rows: Addresses, place: int) -> tuple[int, int, int, int]:
    return (
        int(rows.ranks[place]),
        int(rows.calls[place]),
        int(rows.sequences[place]),
        int(rows.positions[place]),
    )


def _code(rank: int, sequence: int, position: int) -> int:
    return rank << 53 | sequence << 26 | position


def _codes(rows: Addresses) -> Ints:
    return rows.ranks << 53 | rows.sequences << 26 | rows.positions


def by_call(sources: Sequence[Source]) -> dict[tuple[int, int], Source]:
    """(rank, call) -> source."""
    return {(source.rank, source.call): source for source in sources}
