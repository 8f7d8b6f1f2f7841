"""Captured logits of the rows that predict response tokens.

Takes the points of one side and its tables; gives logits by (sequence, position), in bounded number, and the
largest difference of every joined row's logits. Also reads them the wrong way round on purpose: shifted by one,
with the labels of a neighbour, to tell log-probs that were put at other tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainfer.check.align.points import Point, Source
from trainfer.check.align.rows import NO_ROW
from trainfer.check.compare.logprobs import Floats, ScoredTokens, as_floats, plain, sampling_of
from trainfer.check.compare.records import TokenFinding
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.tables import RowPlans
from trainfer.check.compare.values import source_rows
from trainfer.check.dump.reader import DamagedRecordError
from trainfer.check.dump.records import SequenceRecord, Task
from trainfer.types import SamplingParams

MAX_ELEMENTS = 1 << 26
"""Logits kept of one side."""

_MIN_SHARE = 0.9
"""Of a sequence's tokens that must fit, to say that they stand elsewhere."""

RowLogits = dict[tuple[int, int], Tensor]


def logits_point(points: Mapping[Point, Sequence[Source]]) -> Point | None:
    """Where a side gave its logits: the head, else the model itself."""
    found = [p for p in points if p.phase == "forward" and p.direction == "output" and not p.function]
    heads = [p for p in found if p.module.rpartition(".")[2] == "lm_head" and p.part == "output"]
    roots = [p for p in found if p.part == "logits"]
    return (roots or heads or [None])[0]


def read_logits(
    side: ReadableSide,
    name: str,
    sources: Sequence[Source],
    plans: RowPlans,
    records: Mapping[int, SequenceRecord],
) -> RowLogits:
    """Logits of the rows from the last prompt token on, sequence by sequence up to ``MAX_ELEMENTS``."""
    tables = plans.tables(name, sources)
    if tables is None or not sources or sources[0].first.task is not Task.TENSOR:
        return {}
    width = max(sources[0].width, 1)
    wanted, room = set[int](), MAX_ELEMENTS // width
    for index, record in records.items():
        room -= len(record.logprobs) + 1
        if room < 0 and wanted:
            break
        wanted.add(index)
    found: RowLogits = {}
    for source, table_id in zip(sources, tables, strict=True):
        table = plans.table(name, table_id)
        slots = np.flatnonzero((table.keys != NO_ROW) & np.isin(table.labels, sorted(wanted)))
        keep = [
            slot
            for slot in slots.tolist()
            if table.positions[slot] >= records[int(table.labels[slot])].prompt_length - 1
        ]
        if not keep:
            continue
        try:
            rows = source_rows(side, source)
        except DamagedRecordError:
            continue
        for slot in keep:
            found.setdefault((int(table.labels[slot]), int(table.positions[slot])), rows[slot].clone())
    return found


def misplaced_logprobs(
    name: str, records: Mapping[int, SequenceRecord], logits: RowLogits, tolerance: float
) -> list[TokenFinding]:
    """Recorded log-probs that belong to other tokens than those beside which they stand."""
    findings: list[TokenFinding] = []
    for index, record in records.items():
        recorded = as_floats(record.logprobs)
        if len(recorded) == 0 or _fits(recorded, _derived(record, logits, index, 0), tolerance) == len(
            recorded
        ):
            continue
        finding = _shifted(name, index, record, logits, recorded, tolerance)
        finding = finding or _rolled(name, index, records, logits, recorded, tolerance)
        finding = finding or _of_other(name, index, records, logits, recorded, tolerance)
        if finding is not None:
            findings.append(finding)
    return findings


def _derived(record: SequenceRecord, logits: RowLogits, index: int, shift: int, row_shift: int = 0) -> Floats:
    """Log-prob of the token ``shift`` places later, for each response token; NaN where it has no logits.

    ``row_shift``: read from the row so many places after the one before the token.
    """
    derived = np.full(len(record.logprobs), np.nan)
    rows: list[Tensor] = []
    targets: list[int] = []
    places: list[int] = []
    for step in range(len(derived)):
        position = record.prompt_length + step + shift
        row = logits.get((index, position - 1 + row_shift))
        if row is not None and 0 <= position < len(record.tokens) and record.tokens[position] < len(row):
            rows.append(row)
            targets.append(record.tokens[position])
            places.append(step)
    if rows:
        derived[places] = _plain_rows(rows, targets, sampling_of(record))
    return derived


def _plain_rows(rows: Sequence[Tensor], targets: Sequence[int], sampling: SamplingParams) -> Floats:
    tokens = ScoredTokens(
        logits_SV=torch.stack(list(rows)),
        targets_S=torch.tensor(targets),
        recorded_S=np.zeros(len(targets)),
        sampling=(sampling,) * len(targets),
        sequences=(0,) * len(targets),
        positions=(0,) * len(targets),
    )
    return plain(tokens, sampling.temperature)


def _fits(recorded: Floats, derived: Floats, tolerance: float) -> int:
    with np.errstate(invalid="ignore"):
        return int(np.count_nonzero(np.abs(recorded - derived) <= tolerance * (1 + np.abs(derived))))


def _finding(
    name: str,
    index: int,
    record: SequenceRecord,
    note: str,
    *,
    lag: int | None = None,
    other: int | None = None,
) -> TokenFinding:
    return TokenFinding(
        kind=f"{name}_logprobs",
        sequence=index,
        edits=(),
        first=record,
        second=None,
        lag=lag,
        other_sequence=other,
        note=note,
    )


def _shifted(
    name: str, index: int, record: SequenceRecord, logits: RowLogits, recorded: Floats, tolerance: float
) -> TokenFinding | None:
    ways = [(shift, 0, f"log-prob of token t is that of token t{shift:+d}") for shift in (1, -1)]
    ways.append((0, 1, "token t is scored by its own row, not by the row before it"))
    ways.append((0, -1, "token t is scored by the row two places before it"))
    for shift, row_shift, note in ways:
        derived = _derived(record, logits, index, shift, row_shift)
        known = int(np.count_nonzero(~np.isnan(derived)))
        if known >= 3 and _fits(recorded, derived, tolerance) >= _MIN_SHARE * known:
            return _finding(name, index, record, note, lag=shift or row_shift)
    return None


def _rolled(
    name: str,
    index: int,
    records: Mapping[int, SequenceRecord],
    logits: RowLogits,
    recorded: Floats,
    tolerance: float,
) -> TokenFinding | None:
    """Only the last token is off, and it is scored as the first token of the next sequence."""
    record = records[index]
    derived = _derived(record, logits, index, 0)
    if len(recorded) < 2 or _fits(recorded[:-1], derived[:-1], tolerance) < len(recorded) - 1:
        return None
    order = list(records)
    following = order[(order.index(index) + 1) % len(order)]
    label = records[following].tokens[0]
    for position in (len(record.tokens) - 2, len(record.tokens) - 1):
        row = logits.get((index, position))
        if row is None or label >= len(row):
            continue
        value = _plain_rows([row], [label], sampling_of(record))
        if _fits(recorded[-1:], value, tolerance):
            note = f"the last token's log-prob is that of {label}, the first token of sequence {following}"
            return _finding(name, index, record, note, other=following)
    return None


def _of_other(
    name: str,
    index: int,
    records: Mapping[int, SequenceRecord],
    logits: RowLogits,
    recorded: Floats,
    tolerance: float,
) -> TokenFinding | None:
    for other, record in records.items():
        derived = _derived(record, logits, other, 0) if other != index else np.empty(0)
        count = min(len(recorded), len(derived))
        if count >= 3 and _fits(recorded[:count], derived[:count], tolerance) >= _MIN_SHARE * count:
            note = f"these are the log-probs of sequence {other}"
            return _finding(name, index, records[index], note, other=other)
    return None


def largest_differences(
    sides: tuple[ReadableSide, ReadableSide],
    sources: tuple[Sequence[Source], Sequence[Source]],
    plans: RowPlans,
) -> dict[tuple[int, int], float]:
    """(sequence, position) -> largest |difference| of that row's logits."""
    tables = plans.tables("rollout", sources[0]), plans.tables("train", sources[1])
    if tables[0] is None or tables[1] is None or sources[0][0].first.task is not Task.TENSOR:
        return {}
    plan = plans.between(tables[0], tables[1])
    found: dict[tuple[int, int], float] = {}
    done = 0
    for block in plan.blocks:
        count = len(block.rollout_slots)
        labels = plan.rows.labels[done : done + count].tolist()
        positions = plan.rows.positions[done : done + count].tolist()
        done += count
        try:
            x = source_rows(sides[0], sources[0][block.rollout]).index_select(
                0, torch.tensor(block.rollout_slots)
            )
            y = source_rows(sides[1], sources[1][block.train]).index_select(
                0, torch.tensor(block.train_slots)
            )
        except DamagedRecordError:
            continue
        width = min(x.shape[1], y.shape[1])
        off = (x[:, :width].float() - y[:, :width].float()).abs().amax(1).numpy()
        for label, position, value in zip(labels, positions, off, strict=True):
            found[label, position] = max(float(value), found.get((label, position), 0.0))
    return found
