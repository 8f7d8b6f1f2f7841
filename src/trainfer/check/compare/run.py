"""Compares two sides, stage by stage: tokens, weights, modules, log-probs, batch shape.

Takes two sides; gives a ``Comparison``: what every stage found, without a word about causes. A stage is judged
only where the stages before are proven: behind a weight that differs, modules and log-probs are measured and
shown, and not judged.
"""

from collections.abc import Callable, Mapping, Sequence

from trainfer.check.align.adapters import PointJoin
from trainfer.check.align.names import NameMap
from trainfer.check.align.points import SidePoints
from trainfer.check.compare.coverage import describe_coverage
from trainfer.check.compare.joined import JoinedSides, join_sides
from trainfer.check.compare.judge import Judged, judge, module_label
from trainfer.check.compare.pairs import PairComparer
from trainfer.check.compare.records import (
    Comparison,
    PointResult,
    Stage,
    Status,
)
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.tail import TailFacts, examine_tail, logprob_stage, tokens_stage
from trainfer.check.compare.tolerance import Tolerances, tolerances
from trainfer.check.compare.weights import WeightResult


def run_stages(
    rollout: ReadableSide,
    train: ReadableSide,
    *,
    names: NameMap | None = None,
    joined: JoinedSides | None = None,
    judge_again: Callable[[Judged], Judged] | None = None,
) -> Comparison:
    """All five stages.

    Args:
        rollout: The side that generated; for two dumps of one kind the reference.
        train: The other one.
        names: Rules for modules' names; None takes trainfer's own.
        joined: The two sides put together, where that was done before.
        judge_again: Changes what was judged of modules by what a replay found.
    """
    both = joined or join_sides(rollout, train, names=names)
    limits = tolerances()
    raw, tokens, weights, tables = both.raw, both.tokens, both.weights, both.tables
    plans, points, join = both.plans, both.points, both.join
    comparer = PairComparer(rollout, train, plans)
    judged = judge(comparer.compare(join.pairs), limits)
    if judge_again is not None:
        judged = judge_again(judged)
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
