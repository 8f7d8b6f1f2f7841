"""Which row of one side is which row of the other.

Takes row tables; gives the slots that belong together. A row's key is its weights version with the digest
of its token prefix; where one key stands in several rows of a side (a group shares its prompt, a pass is
repeated), rows of the same recorded sequence are joined first.

Integers only. Slots without a row (padding, warm-up, tokens past the end) never take part.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainfer.check.align.side import Side
from trainfer.check.dump.digest import prefix_digests
from trainfer.check.dump.reader import ROW_TYPE, DamagedRecordError
from trainfer.check.dump.records import MISSING, SequenceRecord

Ints = NDArray[np.int64]
TableId = tuple[int, int]
"""(rank, table)."""

NO_ROW = -1
UNLABELLED = -1
"""A row of an executed sequence that no side recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledTable:
    """A row table in terms of both sides. Arrays have one element per slot."""

    keys: Ints
    """Equal numbers are equal keys, on either side; ``NO_ROW`` where the slot holds none."""
    labels: Ints
    """Index of the row's sequence in the rollout's recorded sequences, else ``UNLABELLED``."""
    positions: Ints
    tokens: Ints
    pass_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Slots of one table that belong to slots of another: element i to element i."""

    rollout: int
    """Which of the tables handed in."""
    train: int
    rollout_slots: Ints
    train_slots: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutedSequence:
    """Tokens that a side ran, put together from its row tables."""

    rank: int
    number: int
    positions: Ints
    """Ascending; the first is above 0 where a cache supplied the rows before."""
    tokens: Ints
    digests: NDArray[np.uint64]
    """``[rows, 2]``."""


class RawTables:
    """One side's row tables as written."""

    def __init__(self, side: Side) -> None:
        """Read all of them; damaged ones are named in ``problems``."""
        self.problems: list[str] = []
        self.slots: dict[TableId, np.ndarray] = {}
        self.versions: dict[TableId, int] = {}
        self.passes: dict[TableId, str] = {}
        for rank in side.ranks:
            calls = side.calls(rank)
            for number, record in side.row_tables(rank).items():
                call = calls.get(record.call)
                if call is None:
                    continue
                try:
                    self.slots[rank, number] = side.rows(rank, record)
                except DamagedRecordError as error:
                    self.problems.append(f"rank {rank}: {error}")
                    continue
                self.versions[rank, number] = call.weights_version
                self.passes[rank, number] = call.pass_name

    @property
    def num_rows(self) -> int:
        """Distinct (sequence, position) rows."""
        return sum(len(item.positions) for item in self.executed())

    def executed(self) -> list[ExecutedSequence]:
        """Sequences as they were run, rank after rank."""
        found: list[ExecutedSequence] = []
        for rank in sorted({rank for rank, _ in self.slots}):
            tables = [
                table[table["position"] != MISSING] for (r, _), table in self.slots.items() if r == rank
            ]
            rows = np.concatenate(tables) if tables else np.empty(0, ROW_TYPE)
            found += _split_sequences(rank, rows)
        return found


def _split_sequences(rank: int, rows: np.ndarray) -> list[ExecutedSequence]:
    order = np.lexsort((rows["position"], rows["sequence"]))
    rows = rows[order]
    fresh = np.ones(len(rows), dtype=bool)
    fresh[1:] = (np.diff(rows["sequence"]) != 0) | (np.diff(rows["position"]) != 0)
    rows = rows[fresh]
    edges = np.flatnonzero(np.diff(rows["sequence"])) + 1
    return [
        ExecutedSequence(
            rank=rank,
            number=int(part["sequence"][0]),
            positions=part["position"].astype(np.int64),
            tokens=part["token"].astype(np.int64),
            digests=part["digest"],
        )
        for part in np.split(rows, edges)
        if len(part)
    ]


class PrefixIndex:
    """Recorded sequences by the digest of each of their prefixes."""

    def __init__(self, sequences: Sequence[SequenceRecord]) -> None:
        self.lengths = [len(record.tokens) for record in sequences]
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for index, record in enumerate(sequences):
            digests = prefix_digests(np.array(record.tokens, dtype=np.int64))
            for position, (low, high) in enumerate(digests.tolist()):
                self._places.setdefault((low, high), []).append((index, position))

    def find(self, digest: tuple[int, int]) -> list[tuple[int, int]]:
        """(sequence, position) of every recorded prefix with this digest."""
        return self._places.get(digest, [])

    def longest(self, executed: ExecutedSequence) -> tuple[list[int], int]:
        """Recorded sequences that share the longest prefix with an executed one, and the last shared position."""
        for digest in reversed(executed.digests.tolist()):
            places = self.find((digest[0], digest[1]))
            if places:
                return [index for index, _ in places], places[0][1]
        return [], -1


def label_executed(
    executed: Sequence[ExecutedSequence], index: PrefixIndex
) -> dict[tuple[int, int], tuple[int, int]]:
    """(rank, number) -> (recorded sequence, last shared position).

    Equal sequences (and repeated passes) are handed out evenly, in order.
    """
    uses: Counter[int] = Counter()
    labels: dict[tuple[int, int], tuple[int, int]] = {}
    for item in executed:
        candidates, position = index.longest(item)
        if candidates:
            choice = min(candidates, key=lambda candidate: (uses[candidate], candidate))
            uses[choice] += 1
            labels[item.rank, item.number] = (choice, position)
    return labels


def label_tables(
    raw: tuple[RawTables, RawTables],
    versions: tuple[Mapping[int, int], Mapping[int, int]],
    labels: tuple[Mapping[tuple[int, int], int], Mapping[tuple[int, int], int]],
) -> tuple[dict[TableId, LabelledTable], dict[TableId, LabelledTable]]:
    """Both sides' tables (rollout, train) with keys as common integers.

    Args:
        raw: The tables as written.
        versions: Each side's weights versions as common numbers; a version that is missing has no counterpart.
        labels: (rank, sequence number) -> index into the rollout's recorded sequences.
    """
    digests = [table["digest"][table["position"] != MISSING] for side in raw for table in side.slots.values()]
    stacked = np.concatenate(digests) if digests else np.empty((0, 2), np.uint64)
    _, codes = np.unique(stacked.view("<u8,<u8").reshape(-1), return_inverse=True)
    num_codes = int(codes.max(initial=-1)) + 1
    offset = 0
    result: tuple[dict[TableId, LabelledTable], dict[TableId, LabelledTable]] = ({}, {})
    for side, version_numbers, label_numbers, out in zip(raw, versions, labels, result, strict=True):
        fresh = max(versions[0].values(), default=0) + max(versions[1].values(), default=0) + 2
        for table_id, table in side.slots.items():
            real = table["position"] != MISSING
            count = int(np.count_nonzero(real))
            version = version_numbers.get(side.versions[table_id], fresh + (out is result[1]))
            keys = np.full(len(table), NO_ROW, dtype=np.int64)
            keys[real] = codes[offset : offset + count] + version * num_codes
            offset += count
            sequences, inverse = np.unique(table["sequence"], return_inverse=True)
            known = [label_numbers.get((table_id[0], int(number)), UNLABELLED) for number in sequences]
            out[table_id] = LabelledTable(
                keys=keys,
                labels=np.array(known, dtype=np.int64)[inverse],
                positions=table["position"].astype(np.int64),
                tokens=table["token"].astype(np.int64),
                pass_name=side.passes[table_id],
            )
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Rows of several tables, sorted by (key, label)."""

    keys: Ints
    labels: Ints
    tables: Ints
    slots: Ints


def _gather(tables: Sequence[LabelledTable]) -> _Rows:
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []
    for number, table in enumerate(tables):
        slots = np.flatnonzero(table.keys != NO_ROW)
        parts.append((table.keys[slots], table.labels[slots], np.full(len(slots), number), slots))
    columns = [
        np.concatenate([part[i] for part in parts]) if parts else np.empty(0, np.int64) for i in range(4)
    ]
    order = np.lexsort((columns[1], columns[0]))
    keys, labels, numbers, slots = (column[order] for column in columns)
    return _Rows(keys=keys, labels=labels, tables=numbers, slots=slots)


def join_rows(rollout: Sequence[LabelledTable], train: Sequence[LabelledTable]) -> list[Slots]:
    """Pairs of slots with equal keys.

    Every row of either side whose key the other side has takes part at least once. The n-th row of one key and
    sequence goes to the n-th of the other side, the last one again where there are fewer.
    """
    a, b = _gather(rollout), _gather(train)
    if not len(a.keys) or not len(b.keys):
        return []
    to_a = _partners(b, a)
    has = to_a >= 0
    pairs_a, pairs_b = to_a[has], np.flatnonzero(has)
    left = np.ones(len(a.keys), dtype=bool)
    left[pairs_a] = False
    rest = np.flatnonzero(left)
    to_b = _partners(a, b)[rest]
    pairs_a = np.concatenate([pairs_a, rest[to_b >= 0]])
    pairs_b = np.concatenate([pairs_b, to_b[to_b >= 0]])
    return _blocks(a, b, pairs_a, pairs_b)


def _partners(rows: _Rows, others: _Rows) -> Ints:
    """For each row the place of its partner among ``others``, -1 where the key is not there."""
    label_span = max(int(rows.labels.max()), int(others.labels.max())) + 2
    mine = rows.keys * label_span + rows.labels + 1
    theirs = others.keys * label_span + others.labels + 1
    rank = np.arange(len(mine)) - np.searchsorted(mine, mine)
    first, last = np.searchsorted(theirs, mine), np.searchsorted(theirs, mine, side="right")
    same = last > first
    partner = np.where(same, first + np.minimum(rank, last - first - 1), -1)
    by_key = np.searchsorted(others.keys, rows.keys)
    found = by_key < len(others.keys)
    found[found] = others.keys[by_key[found]] == rows.keys[found]
    return np.where(same, partner, np.where(found, by_key, -1))


def _blocks(a: _Rows, b: _Rows, pairs_a: Ints, pairs_b: Ints) -> list[Slots]:
    order = np.lexsort((b.slots[pairs_b], a.tables[pairs_a], b.tables[pairs_b]))
    pairs_a, pairs_b = pairs_a[order], pairs_b[order]
    tables_a, tables_b = a.tables[pairs_a], b.tables[pairs_b]
    edges = np.flatnonzero((np.diff(tables_a) != 0) | (np.diff(tables_b) != 0)) + 1
    return [
        Slots(
            rollout=int(tables_a[part[0]]),
            train=int(tables_b[part[0]]),
            rollout_slots=a.slots[pairs_a[part]],
            train_slots=b.slots[pairs_b[part]],
        )
        for part in np.split(np.arange(len(pairs_a)), edges)
        if len(part)
    ]


def repeated_rows(tables: Sequence[LabelledTable]) -> list[Slots]:
    """Each row whose key came earlier on the same side, with the first row of that key."""
    rows = _gather(tables)
    if not len(rows.keys):
        return []
    by_time = np.lexsort((rows.slots, rows.tables, rows.keys))
    keys = rows.keys[by_time]
    first = by_time[np.searchsorted(keys, keys)]
    again = by_time != first
    return _blocks(rows, rows, first[again], by_time[again])
