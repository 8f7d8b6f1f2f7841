"""Joined rows: which slots of which calls belong together, computed once per combination of calls.

Takes both sides' labelled tables; gives slot pairs and what rows they are. Most points of a model share
one combination, so the plan of the first serves all.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainfer.check.align.points import Source
from trainfer.check.align.rows import LabelledTable, Slots, TableId, join_rows, repeated_rows
from trainfer.check.compare.records import JoinedRows
from trainfer.check.dump.records import NO_TABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Blocks of joined slots, and the rows in the order of the blocks."""

    blocks: tuple[Slots, ...]
    rows: JoinedRows


class RowPlans:
    """Plans by the tables that take part."""

    def __init__(
        self, rollout: Mapping[TableId, LabelledTable], train: Mapping[TableId, LabelledTable]
    ) -> None:
        self._sides = {"rollout": rollout, "train": train}
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._lock = threading.Lock()

    def tables(self, side: str, sources: Sequence[Source]) -> tuple[TableId, ...] | None:
        """Tables of one side's sources; None where some source's rows are not known."""
        ids = tuple((source.rank, source.table) for source in sources)
        known = self._sides[side]
        return ids if all(number != NO_TABLE and (rank, number) in known for rank, number in ids) else None

    def table(self, side: str, table: TableId) -> LabelledTable:
        """One labelled table."""
        return self._sides[side][table]

    def same_rows(self, rollout: Source, train: Source) -> bool:
        """False where both calls' rows are known and are not the same ones in the same slots."""
        first = self._sides["rollout"].get((rollout.rank, rollout.call_table))
        second = self._sides["train"].get((train.rank, train.call_table))
        return first is None or second is None or np.array_equal(first.keys, second.keys)

    def between(self, rollout: tuple[TableId, ...], train: tuple[TableId, ...]) -> Plan:
        """Rows that both sides have."""
        return self._cached(("both", rollout, train), rollout, train)

    def within(self, side: str, ids: tuple[TableId, ...]) -> Plan:
        """Rows that one side has more than once."""
        return self._cached((side, ids), ids, ids)

    def _cached(
        self, key: tuple[object, ...], first: tuple[TableId, ...], second: tuple[TableId, ...]
    ) -> Plan:
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                within = str(key[0]) if len(key) == 2 else ""
                plan = self._plans[key] = self._make(within, first, second)
            return plan

    def _make(self, within: str, first: tuple[TableId, ...], second: tuple[TableId, ...]) -> Plan:
        a = [self._sides[within or "rollout"][table] for table in first]
        b = [self._sides[within or "train"][table] for table in second]
        blocks = tuple(repeated_rows(a) if within else join_rows(a, b))
        names = tuple(sorted({table.pass_name for table in (*a, *b)}))
        labels = [a[block.rollout].labels[block.rollout_slots] for block in blocks]
        others = [b[block.train].labels[block.train_slots] for block in blocks]
        positions = [b[block.train].positions[block.train_slots] for block in blocks]
        passes = [
            np.full(len(block.rollout_slots), names.index(a[block.rollout].pass_name)) for block in blocks
        ]
        empty = np.empty(0, dtype=np.int64)
        theirs = np.concatenate([empty, *others])
        mine = np.concatenate([empty, *labels])
        return Plan(
            blocks=blocks,
            rows=JoinedRows(
                labels=np.where(theirs >= 0, theirs, mine),
                positions=np.concatenate([empty, *positions]),
                passes=np.concatenate([empty, *passes]),
                pass_names=names,
            ),
        )
