"""What took part in a comparison, and what did not: nothing is left out silently.

Takes both sides and the stages' results; gives counts and names for the report.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from trainfer.check.align.adapters import PointJoin
from trainfer.check.align.points import Point
from trainfer.check.align.rows import NO_ROW, LabelledTable, RawTables, TableId
from trainfer.check.compare.judge import Judged
from trainfer.check.compare.records import Coverage, Status
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.tokens import TokenResult
from trainfer.check.compare.weights import WeightResult

_MAX_NAMED = 20


def describe_coverage(
    sides: tuple[ReadableSide, ReadableSide],
    raw: tuple[RawTables, RawTables],
    tables: tuple[Mapping[TableId, LabelledTable], Mapping[TableId, LabelledTable]],
    join: PointJoin,
    judged: Judged,
    stages: tuple[TokenResult, WeightResult],
) -> Coverage:
    """Count rows and modules; name what is missing."""
    keys = [_row_keys(raw[i], tables[i]) for i in range(2)]
    matched = int(np.count_nonzero(np.isin(keys[0], keys[1])))
    matched_modules = [m for m in judged.modules if m.status not in (Status.UNMATCHED, Status.UNREADABLE)]
    unmatched = _unmatched(join, judged)
    incomplete = [
        text for side, tables_ in zip(sides, raw, strict=True) for text in _incomplete(side, tables_)
    ]
    incomplete += [
        f"{module.module}: {note}"
        for module in judged.modules
        if module.status is Status.UNREADABLE
        for note in module.notes
    ][:_MAX_NAMED]
    notes = list(stages[1].notes)
    for name, count in zip(("rollout", "train"), stages[0].unrecorded, strict=True):
        if count:
            notes.append(
                f"{count} sequences that the {name} side ran are not among its recorded ones (warm-up?)"
            )
    return Coverage(
        rows_rollout=len(keys[0]),
        rows_train=len(keys[1]),
        rows_matched=matched,
        modules_matched=len(matched_modules),
        modules_unmatched=tuple(unmatched),
        how_matched=dict(Counter(module.how for module in matched_modules)),
        not_rows=_not_rows(sides),
        incomplete=tuple(dict.fromkeys(incomplete)),
        notes=tuple(notes),
    )


def _row_keys(raw: RawTables, tables: Mapping[TableId, LabelledTable]) -> np.ndarray:
    """One key per executed (sequence, position), whatever the number of calls and tables that hold it."""
    parts: list[np.ndarray] = []
    for (rank, number), table in tables.items():
        slots = raw.slots[rank, number]
        real = table.keys != NO_ROW
        columns = (
            np.full(int(real.sum()), rank),
            slots["sequence"][real],
            slots["position"][real],
            table.keys[real],
        )
        parts.append(np.stack(columns, axis=1))
    if not parts:
        return np.empty(0, dtype=np.int64)
    return np.unique(np.concatenate(parts), axis=0)[:, 3]


def _unmatched(join: PointJoin, judged: Judged) -> list[str]:
    """Modules with no output in common, each with its side or the reason."""
    met = {m.module for m in judged.modules if m.status not in (Status.UNMATCHED,)}
    names = [
        f"{module.module}: {module.notes[0] if module.notes else 'no common rows'}"
        for module in judged.modules
        if module.status is Status.UNMATCHED
    ]
    for side, points in (("rollout", join.rollout_only), ("train", join.train_only)):
        names += [
            f"{name or '(model)'} (only in {side})"
            for name in dict.fromkeys(_outputs(points))
            if name not in met
        ]
    return list(dict.fromkeys(names))


def _outputs(points: Sequence[Point]) -> list[str]:
    return [p.module for p in points if p.direction == "output" and p.phase == "forward" and not p.function]


def _incomplete(side: ReadableSide, raw: RawTables) -> list[str]:
    found = [f"{side.name}: {problem}" for problem in (*side.problems, *raw.problems)]
    if side.missing_ranks:
        found.append(f"{side.name}: no dump of ranks {list(side.missing_ranks)}")
    if side.manifest.finished is None:
        found.append(f"{side.name}: the capture was never closed; what is whole was read")
    found += [f"{side.name}: {reason}" for reason in side.manifest.incomplete_reasons]
    return found[:_MAX_NAMED]


def _not_rows(sides: tuple[ReadableSide, ReadableSide]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, side in zip(("rollout", "train"), sides, strict=True):
        for rank in side.ranks:
            for call in side.calls(rank).values():
                counts[f"{name} padding"] += call.counts.padding
                counts[f"{name} cached"] += call.counts.cached
                counts[f"{name} discarded"] += call.counts.discarded
                counts[f"{name} unknown"] += call.counts.unknown
    return {name: count for name, count in counts.items() if count}
