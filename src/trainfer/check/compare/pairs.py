"""Compares pairs of points: reads both sides' rows block by block, many pairs at a time.

Takes joined points; gives a raw ``PointResult`` for each (its status is decided by ``judge``). Pairs whose
bytes are the same on both sides (the output of one module is the input of the next) are compared once.
Memory: one tensor per side and thread, and one float per row and point.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainfer.check.align.adapters import PointPair
from trainfer.check.align.layouts import gather_shards
from trainfer.check.align.points import Op, Point, Source
from trainfer.check.align.rows import Slots, TableId
from trainfer.check.compare.metrics import compare_rows
from trainfer.check.compare.records import JoinedRows, Metrics, PointResult, Status
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.statistics import compare_statistics
from trainfer.check.compare.tables import RowPlans
from trainfer.check.compare.values import source_rows
from trainfer.check.dump.reader import DamagedRecordError
from trainfer.check.dump.records import Task

MAX_THREADS = 8
_BYTES_WORTH_A_THREAD = 4 * 2**20
"""Of a pair, both sides together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the bytes of one pair say."""

    metrics: Metrics
    errors: NDArray[np.float32]
    rows: JoinedRows | None
    status: Status | None
    """Set where numbers alone do not say it: unmatched or unreadable."""
    notes: tuple[str, ...] = ()


_NO_ERRORS = np.empty(0, dtype=np.float32)


class PairComparer:
    """Compares the points of two sides."""

    def __init__(self, rollout: ReadableSide, train: ReadableSide, plans: RowPlans) -> None:
        self._sides = {"rollout": rollout, "train": train}
        self._plans = plans
        self._gathered: dict[Point, PointPair] = {}

    def compare(self, pairs: Sequence[PointPair]) -> list[PointResult]:
        """All pairs, in their order."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, pair in enumerate(pairs):
            groups.setdefault(_bytes_key(pair), []).append(number)
        firsts = [pairs[numbers[0]] for numbers in groups.values()]
        outcomes = self._map(firsts)
        results: list[PointResult | None] = [None] * len(pairs)
        for numbers, (pair, outcome) in zip(groups.values(), outcomes, strict=True):
            first = pairs[numbers[0]]
            for number in numbers:
                how = pairs[number].how if pair.how == first.how else pair.how
                whole = replace(pairs[number], rollout=pair.rollout, train=pair.train, how=how)
                self._gathered[whole.point] = whole
                results[number] = _result(whole, outcome)
        return [result for result in results if result is not None]

    def repeated(self, side: str, pairs: Sequence[PointPair]) -> list[PointResult]:
        """Rows that one side computed more than once, against their first time; shards as ``compare`` put them."""
        results: list[PointResult] = []
        for joined in pairs:
            pair = self._gathered.get(joined.point, joined)
            sources = pair.rollout if side == "rollout" else pair.train
            tables = self._plans.tables(side, sources)
            if tables is None or sources[0].first.task is Task.STATISTICS:
                continue
            plan = self._plans.within(side, tables)
            if not plan.blocks:
                continue
            outcome = self._blocks((side, side), (sources, sources), plan.blocks, plan.rows)
            results.append(_result(replace(pair, rollout=sources, train=sources), outcome))
        return results

    def _map(self, pairs: Sequence[PointPair]) -> list[tuple[PointPair, Outcome]]:
        """Side by side only where tensors are large: for small ones the threads mostly wait for one another's Python."""
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        if threads == 1 or len(pairs) < 8 or sum(map(_nbytes, pairs)) < len(pairs) * _BYTES_WORTH_A_THREAD:
            return [self._pair(pair) for pair in pairs]
        with ThreadPoolExecutor(threads, thread_name_prefix="trainfer-compare") as pool:
            return list(pool.map(self._pair, pairs))

    def _pair(self, pair: PointPair) -> tuple[PointPair, Outcome]:
        tables = [
            self._plans.tables(side, sources)
            for side, sources in (("rollout", pair.rollout), ("train", pair.train))
        ]
        if tables[0] is not None and tables[1] is not None:
            pair = self._gather(pair)
            first, second = (
                self._plans.tables(side, sources)
                for side, sources in (("rollout", pair.rollout), ("train", pair.train))
            )
            assert first is not None
            assert second is not None
            return self._joined_by_key(pair, first, second)
        return pair, self._joined_by_order(pair)

    def _gather(self, pair: PointPair) -> PointPair:
        """Tensor-parallel shards, where one side is narrower than the other."""
        widths = pair.rollout[0].width, pair.train[0].width
        if widths[0] == widths[1]:
            return pair
        side, sources = ("rollout", pair.rollout) if widths[0] < widths[1] else ("train", pair.train)
        same = {
            (source.rank, source.table): self._plans.table(side, (source.rank, source.table)).keys.tobytes()
            for source in sources
        }
        gathered = gather_shards(sources, max(widths), same)
        how = "shards" if gathered != tuple(sources) else pair.how
        changed = {"rollout": gathered} if side == "rollout" else {"train": gathered}
        return replace(pair, how=how, **changed)

    def _joined_by_key(
        self, pair: PointPair, first: tuple[TableId, ...], second: tuple[TableId, ...]
    ) -> tuple[PointPair, Outcome]:
        plan = self._plans.between(first, second)
        if not plan.blocks:
            note = "no row of it has the same weights version and token prefix on both sides"
            return pair, _unmatched(note)
        if Task.STATISTICS in (pair.rollout[0].first.task, pair.train[0].first.task):
            return pair, self._statistics(pair, plan.blocks)
        if pair.point.function and pair.rollout[0].width != pair.train[0].width:
            return pair, _unmatched("a function's value that is as wide as the batch is long")
        outcome = self._blocks(("rollout", "train"), (pair.rollout, pair.train), plan.blocks, plan.rows)
        for layout in pair.other_layouts:
            if len(outcome.errors) == 0 or float(np.median(outcome.errors)) < 0.1:
                break
            changed = {
                pair.fused_side: tuple(
                    replace(source, columns=layout)
                    for source in (pair.rollout if pair.fused_side == "rollout" else pair.train)
                )
            }
            other = replace(pair, **changed)
            tried = self._blocks(("rollout", "train"), (other.rollout, other.train), plan.blocks, plan.rows)
            if len(tried.errors) and float(tried.errors.max()) < float(np.median(outcome.errors)) / 8:
                note = "the parts of the fused module lie in another order than its name says; found by value"
                return replace(other, how="fused"), replace(tried, notes=(*tried.notes, note))
        return pair, outcome

    def _blocks(
        self,
        names: tuple[str, str],
        sources: tuple[Sequence[Source], Sequence[Source]],
        blocks: Sequence[Slots],
        rows: JoinedRows,
    ) -> Outcome:
        total, errors, notes = Metrics(), list[NDArray[np.float32]](), dict[str, None]()
        held: dict[tuple[str, int], Tensor] = {}
        for block in blocks:
            try:
                x = self._rows_of(names[0], sources[0], block.rollout, held)
                y = self._rows_of(names[1], sources[1], block.train, held)
                x, y = _take(x, block.rollout_slots), _take(y, block.train_slots)
            except DamagedRecordError as error:
                return Outcome(
                    metrics=Metrics(),
                    errors=_NO_ERRORS,
                    rows=None,
                    status=Status.UNREADABLE,
                    notes=(str(error),),
                )
            if x.shape[1] != y.shape[1]:
                notes[f"rows of {x.shape[1]} features in the rollout and {y.shape[1]} in training"] = None
                narrow = min(x.shape[1], y.shape[1])
                x, y = x[:, :narrow], y[:, :narrow]
            metrics, row_errors = compare_rows(x, y)
            if notes:
                row_errors = np.full_like(row_errors, np.inf)
            total = total.plus(metrics)
            errors.append(row_errors)
        return Outcome(
            metrics=total,
            errors=np.concatenate([_NO_ERRORS, *errors]),
            rows=rows,
            status=None,
            notes=tuple(notes),
        )

    def _rows_of(
        self, side: str, sources: Sequence[Source], number: int, held: dict[tuple[str, int], Tensor]
    ) -> Tensor:
        """Rows of one source; the last ones of either side are kept, since blocks come source by source."""
        key = (side, number)
        if key not in held:
            size = sum(tensor.nbytes for tensor in held.values())
            while held and size > _HELD_BYTES:
                size -= held.pop(next(iter(held))).nbytes
            held[key] = source_rows(self._sides[side], sources[number])
        return held[key]

    def _statistics(self, pair: PointPair, blocks: Sequence[Slots]) -> Outcome:
        """Numbers over whole tensors can be compared only where both calls hold the same rows and no others."""
        whole = [
            block
            for block in blocks
            if len(block.rollout_slots) == pair.rollout[block.rollout].slots
            and len(block.train_slots) == pair.train[block.train].slots
        ]
        if not whole:
            return _unmatched("statistics of calls that hold different rows cannot be compared")
        metrics, errors, notes = compare_statistics(
            [(pair.rollout[block.rollout].first, pair.train[block.train].first) for block in whole]
        )
        return Outcome(metrics=metrics, errors=errors, rows=None, status=None, notes=notes)

    def _joined_by_order(self, pair: PointPair) -> Outcome:
        """Rows are not known on one side: call by call, where both sides have the same calls and shapes."""
        if len(pair.rollout) != len(pair.train):
            counts = f"{len(pair.rollout)} calls in the rollout and {len(pair.train)} in training"
            return _unmatched(f"its rows are not known, and there are {counts}")
        both = list(zip(pair.rollout, pair.train, strict=True))
        if any(a.op is not Op.SINGLE or b.op is not Op.SINGLE for a, b in both):
            return _unmatched("its rows are not known")
        if not all(self._plans.same_rows(a, b) for a, b in both):
            return _unmatched("its rows are not known, and the calls hold other rows or hold them otherwise")
        if Task.STATISTICS in (pair.rollout[0].first.task, pair.train[0].first.task):
            metrics, errors, notes = compare_statistics([(a.first, b.first) for a, b in both])
            return Outcome(metrics=metrics, errors=errors, rows=None, status=None, notes=notes)
        total, errors_list, notes = Metrics(), list[NDArray[np.float32]](), tuple[str, ...]()
        for a, b in both:
            try:
                x, y = (
                    self._sides["rollout"].load(a.rank, a.first),
                    self._sides["train"].load(b.rank, b.first),
                )
            except DamagedRecordError as error:
                return Outcome(
                    metrics=Metrics(),
                    errors=_NO_ERRORS,
                    rows=None,
                    status=Status.UNREADABLE,
                    notes=(str(error),),
                )
            if x.shape != y.shape:
                notes = (f"shape {tuple(x.shape)} in the rollout and {tuple(y.shape)} in training",)
                errors_list.append(np.full(1, np.inf, dtype=np.float32))
                continue
            width = x.shape[-1] if x.dim() else 1
            if x.numel() == 0:
                continue
            metrics, row_errors = compare_rows(x.reshape(-1, width), y.reshape(-1, width))
            total = total.plus(metrics)
            errors_list.append(row_errors)
        return Outcome(
            metrics=total,
            errors=np.concatenate([_NO_ERRORS, *errors_list]),
            rows=None,
            status=None,
            notes=notes,
        )


_HELD_BYTES = 256 * 2**20


def _take(rows: Tensor, slots: NDArray[np.int64]) -> Tensor:
    if len(slots) and slots[-1] >= len(rows):
        raise DamagedRecordError(f"a row table names slot {slots[-1]} of a tensor with {len(rows)} rows")
    if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all():
        return rows[slots[0] : slots[-1] + 1]
    return rows.index_select(0, torch.tensor(slots))


def _nbytes(pair: PointPair) -> int:
    """What is read of a pair."""
    records = (record for source in (*pair.rollout, *pair.train) for record in source.records)
    return sum(record.blob.nbytes for record in records if record.blob is not None)


def _unmatched(note: str) -> Outcome:
    return Outcome(metrics=Metrics(), errors=_NO_ERRORS, rows=None, status=Status.UNMATCHED, notes=(note,))


def _bytes_key(pair: PointPair) -> tuple[object, ...]:
    """Equal for pairs that read the same bytes in the same way."""
    return (_sources_key(pair.rollout), _sources_key(pair.train), pair.other_layouts)


def _sources_key(sources: Sequence[Source]) -> tuple[object, ...]:
    return tuple(
        (
            source.rank,
            source.ranks,
            source.table,
            source.op,
            source.columns,
            tuple(
                (record.blob.shard, record.blob.offset, record.shape, record.dtype, record.row_dims)
                if record.blob is not None
                else record.id
                for record in source.records
            ),
        )
        for source in sources
    )


def _result(pair: PointPair, outcome: Outcome) -> PointResult:
    first, second = pair.rollout[0].first, pair.train[0].first
    return PointResult(
        point=pair.point,
        how=pair.how if outcome.rows is not None else "order",
        order=pair.order,
        status=outcome.status or Status.NOT_CHECKED,
        metrics=outcome.metrics,
        errors=outcome.errors,
        rows=outcome.rows,
        tolerance=0.0,
        dtypes=(first.dtype, second.dtype),
        shapes=(first.shape, second.shape),
        notes=outcome.notes,
    )
