"""Compares two sides, stage by stage: tokens, weights, modules, log-probs, batch shape.

Takes two sides; gives a ``Comparison``: what every stage found, without a word about causes. A stage is judged
only where the stages before are proven: behind a weight that differs, modules and log-probs are measured and
shown, and not judged.
"""

from collections.abc import Mapping, Sequence

from trainfer.check.align.adapters import PointJoin, join_points
from trainfer.check.align.names import NameMap, name_map
from trainfer.check.align.points import SidePoints, collect
from trainfer.check.align.rows import RawTables, label_tables
from trainfer.check.compare.coverage import describe_coverage
from trainfer.check.compare.judge import Judged, judge, module_label
from trainfer.check.compare.pairs import PairComparer
from trainfer.check.compare.records import (
    Comparison,
    PointResult,
    Stage,
    Status,
)
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.tables import RowPlans
from trainfer.check.compare.tail import TailFacts, examine_tail, logprob_stage, tokens_stage
from trainfer.check.compare.tokens import check_tokens
from trainfer.check.compare.tolerance import Tolerances, tolerances
from trainfer.check.compare.weights import WeightResult, check_weights
from trainfer.check.dump.records import SequenceRecord


def run_stages(rollout: ReadableSide, train: ReadableSide, *, names: NameMap | None = None) -> Comparison:
    """All five stages.

    Args:
        rollout: The side that generated; for two dumps of one kind the reference.
        train: The other one.
        names: Rules for modules' names; None takes trainfer's own.
    """
    names = names or name_map()
    limits = tolerances()
    raw = RawTables(rollout), RawTables(train)
    tokens = check_tokens(rollout, train, raw)
    used = _versions(raw[0], tokens.sequences[0]), _versions(raw[1], tokens.sequences[1])
    head_size = _head_size(train) or _head_size(rollout)
    weights = check_weights(rollout, train, used, names, head_size=head_size)
    tables = label_tables(raw, weights.versions, tokens.labels)
    plans = RowPlans(*tables)
    points = collect(rollout, names), collect(train, names)
    join = join_points(*points, names, head_size=head_size)
    comparer = PairComparer(rollout, train, plans)
    judged = judge(comparer.compare(join.pairs), limits)
    facts = TailFacts(sides=(rollout, train), tokens=tokens, weights=weights, points=points, plans=plans)
    tail = examine_tail(facts, judged, limits)
    repeated = _repeated(comparer, join, limits)
    order = _module_order(points[1], points[0])
    modules = _modules_stage(judged, weights, order)
    logprobs = logprob_stage(tail, modules.status, limits, weights_differ=bool(weights.findings))
    return Comparison(
        stages=(tokens_stage(tokens.stage, tail), weights.stage, modules, logprobs, _batch_stage(repeated)),
        rollout_sequences=tokens.sequences[0],
        train_sequences=tokens.sequences[1],
        tokens=(*tokens.findings, *tail.misplaced),
        weights=weights.findings,
        weights_order=order,
        points=judged.points,
        modules=judged.modules,
        repeated=repeated,
        logprobs=tail.logprobs,
        coverage=describe_coverage((rollout, train), raw, tables, join, judged, (tokens, weights)),
        introduced=judged.introduced,
        stale_versions=weights.stale_versions,
    )


def _versions(raw: RawTables, sequences: Sequence[SequenceRecord]) -> tuple[int, ...]:
    recorded = {record.weights_version for record in sequences if record.pass_name != "executed"}
    return tuple(sorted({*raw.versions.values(), *recorded}))


def _head_size(side: ReadableSide) -> int | None:
    """Of keys, from the model's configuration."""
    config = side.manifest.model_config
    size, width, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(size, int) and size > 0:
        return size
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        return width // heads
    return None


def _module_order(first: SidePoints, second: SidePoints) -> dict[str, int]:
    """Module -> place in execution order, as the first side ran them (the second where it did not)."""
    order: dict[str, int] = {}
    for side in (first, second):
        for point, number in side.order.items():
            if point.direction == "output" and point.phase == "forward":
                order[point.module] = min(number, order.get(point.module, number))
        if order:
            return order
    return order


def _modules_stage(judged: Judged, weights: WeightResult, order: Mapping[str, int]) -> Stage:
    compared = [m for m in judged.modules if m.status not in (Status.UNMATCHED, Status.UNREADABLE)]
    if not compared:
        return Stage(name="modules", status=Status.NOT_CHECKED, summary="no module was matched")
    rows = max(module.rows for module in compared)
    if weights.findings:
        first = min(order.get(finding.module, 0) for finding in weights.findings)
        proven = [module for module in compared if module.order < first]
        if not any(module.status is Status.DIVERGED for module in proven):
            off = sum(module.status is Status.DIVERGED for module in compared)
            text = f"{len(proven)} modules before the first unlike weight agree; {off} behind it differ and are not judged"
            return Stage(name="modules", status=Status.NOT_CHECKED, summary=text)
    counts = {status: sum(m.status is status for m in compared) for status in Status}
    for status in (Status.DIVERGED, Status.ROUNDING, Status.EQUAL):
        if counts[status]:
            text = f"{len(compared)} modules, up to {rows} rows each: {counts[Status.EQUAL]} equal, "
            text += f"{counts[Status.ROUNDING]} within rounding, {counts[Status.DIVERGED]} diverged"
            return Stage(name="modules", status=status, summary=text)
    raise AssertionError("a compared module has one of the three statuses")


def _repeated(comparer: PairComparer, join: PointJoin, limits: Tolerances) -> tuple[PointResult, ...]:
    """Rows with one key that a side computed more than once; those that are off by themselves first."""
    pairs = [pair for pair in join.pairs if pair.point.phase == "forward"]
    found: list[tuple[bool, int, PointResult]] = []
    for side in ("rollout", "train"):
        judged = judge(comparer.repeated(side, pairs), limits)
        for place, result in enumerate(judged.points):
            if result.point.direction == "output":
                inherits = place not in judged.introduced or not judged.introduced[place].any()
                found.append((inherits, result.order, result))
    return tuple(result for _, _, result in sorted(found, key=lambda item: item[:2]))


def _batch_stage(repeated: Sequence[PointResult]) -> Stage:
    if not repeated:
        text = "no row was computed twice by one side"
        return Stage(name="batch_shape", status=Status.NOT_CHECKED, summary=text)
    rows = max(len(result.errors) for result in repeated)
    off = [result for result in repeated if result.status is not Status.EQUAL]
    if not off:
        text = f"{rows} rows that one side computed again came out bitwise equal"
        return Stage(name="batch_shape", status=Status.EQUAL, summary=text)
    diverged = [result for result in off if result.status is Status.DIVERGED]
    first = module_label((diverged or off)[0])
    text = f"up to {rows} rows were computed again; {len(off)} of {len(repeated)} module outputs changed, first {first}"
    return Stage(name="batch_shape", status=Status.DIVERGED if diverged else Status.ROUNDING, summary=text)
