"""Compares two sides, stage by stage: tokens, weights, modules, log-probs, batch shape.

Takes two sides; gives a ``Comparison``: what every stage found, without a word about causes. A stage is judged
only where the stages before are proven: behind a weight that differs, modules and log-probs are measured and
shown, and not judged.
"""

from collections.abc import Mapping, Sequence

from trainfer.check.align.adapters import PointJoin, join_points
from trainfer.check.align.names import NameMap, name_map
from trainfer.check.align.points import Point, SidePoints, collect
from trainfer.check.align.rows import RawTables, label_tables
from trainfer.check.compare.coverage import describe_coverage
from trainfer.check.compare.judge import Judged, judge, module_label
from trainfer.check.compare.logits import largest_differences, logits_point, misplaced_logprobs, read_logits
from trainfer.check.compare.logprobs import (
    ScoredTokens,
    compare_logprobs,
    fit_reading,
    judge_logprobs,
    rescored_mean,
    sampling_of,
    scored_tokens,
)
from trainfer.check.compare.pairs import PairComparer
from trainfer.check.compare.records import (
    Comparison,
    LogprobFit,
    LogprobResult,
    PointResult,
    Stage,
    Status,
    TokenFinding,
)
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.tables import RowPlans
from trainfer.check.compare.tokens import TokenResult, check_tokens
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
    tail = _Tail((rollout, train), tokens, weights, points, plans, judged, limits)
    repeated = _repeated(comparer, join, limits)
    order = _module_order(points[1], points[0])
    modules = _modules_stage(judged, weights, order)
    logprobs = tail.stage(behind=modules.status)
    return Comparison(
        stages=(tail.tokens_stage, weights.stage, modules, logprobs, _batch_stage(repeated)),
        rollout_sequences=tokens.sequences[0],
        train_sequences=tokens.sequences[1],
        tokens=(*tokens.findings, *tail.misplaced),
        weights=weights.findings,
        weights_order=order,
        points=judged.points,
        modules=judged.modules,
        repeated=repeated,
        logprobs=tail.result,
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


class _Tail:
    """What comes after the modules: log-probs, and whether they stand beside their own tokens."""

    def __init__(
        self,
        sides: tuple[ReadableSide, ReadableSide],
        tokens: TokenResult,
        weights: WeightResult,
        points: tuple[SidePoints, SidePoints],
        plans: RowPlans,
        judged: Judged,
        limits: Tolerances,
    ) -> None:
        self._limits = limits
        self._weights = weights
        self._dtype = max(
            (dtype for result in judged.points for dtype in result.dtypes if dtype in limits.unit),
            key=lambda dtype: limits.unit[dtype],
            default=_stored_dtype(sides, limits),
        )
        pairs = [pair for pair in tokens.join.pairs if pair.equal]
        rollout, train = tokens.sequences
        own = (
            {index: record for index, record in enumerate(rollout) if record.logprobs},
            {
                pair.rollout: train[pair.train]
                for pair in reversed(tokens.join.pairs)
                if train[pair.train].logprobs
            },
        )
        together = [
            (pair.rollout, rollout[pair.rollout], train[pair.train])
            for pair in pairs
            if _same_policy(rollout[pair.rollout], train[pair.train], weights)
        ]
        places = logits_point(points[0].sources), logits_point(points[1].sources)
        differences: dict[tuple[int, int], float] = {}
        if places[0] is not None and places[1] is not None:
            both = points[0].sources[places[0]], points[1].sources[places[1]]
            differences = largest_differences(sides, both, plans)
        self._with_logits = bool(differences)
        self.misplaced: list[TokenFinding] = []
        scored = [
            self._scored(name, sides[i], points[i], places[i], plans, own[i])
            for i, name in enumerate(("rollout", "train"))
        ]
        result = compare_logprobs(
            together, differences, self._dtype, limits, policy_moved=len(pairs) - len(together)
        )
        tail = limits.logprobs.tail_units * limits.unit["F32"]
        temperatures = [
            sorted({sampling_of(record).temperature for record in records.values()}) for records in own
        ]
        fits = [
            None if item is None else fit_reading(item, temperatures[1 - i], tail * 4)
            for i, item in enumerate(scored)
        ]
        rescored = None
        if scored[0] is not None and scored[1] is not None:
            rescored = rescored_mean(scored[0], scored[1])
        self.result: LogprobResult | None = None
        if result is not None:
            self.result = _with_fits(result, (fits[0], fits[1]), rescored)
        self.tokens_stage = self._tokens_stage(tokens)

    def _scored(
        self,
        name: str,
        side: ReadableSide,
        points: SidePoints,
        place: Point | None,
        plans: RowPlans,
        records: Mapping[int, SequenceRecord],
    ) -> ScoredTokens | None:
        if place is None or not records:
            return None
        logits = read_logits(side, name, points.sources[place], plans, records)
        scored = scored_tokens(records, logits)
        if scored is not None:
            tail = 4 * self._limits.logprobs.tail_units * self._limits.unit["F32"]
            if fit_reading(scored, (), tail).reading == "unknown":
                self.misplaced += misplaced_logprobs(name, records, logits, tail)
        return scored

    def _tokens_stage(self, tokens: TokenResult) -> Stage:
        if not self.misplaced:
            return tokens.stage
        text = f"log-probs of {len(self.misplaced)} sequences stand beside other tokens: {self.misplaced[0].note}"
        return Stage(name="tokens", status=Status.DIVERGED, summary=text)

    def stage(self, *, behind: Status) -> Stage:
        """The log-prob stage; not judged behind weights that differ."""
        if self.result is None:
            text = "no sequence has log-probs on both sides under one policy"
            return Stage(name="logprobs", status=Status.NOT_CHECKED, summary=text)
        proven = self._with_logits and behind in (Status.EQUAL, Status.ROUNDING)
        judged = judge_logprobs(self.result, self._dtype, self._limits, proven_logits=proven)
        if self._weights.findings and behind is Status.NOT_CHECKED and judged.status is Status.DIVERGED:
            return Stage(
                name="logprobs",
                status=Status.NOT_CHECKED,
                summary=f"{judged.summary}; not judged: weights differ",
            )
        return judged


def _stored_dtype(sides: tuple[ReadableSide, ReadableSide], limits: Tolerances) -> str:
    dtypes = [side.manifest.model_dtype for side in sides if side.manifest.model_dtype in limits.unit]
    return max(dtypes, key=lambda dtype: limits.unit[dtype], default="F32")


def _same_policy(first: SequenceRecord, second: SequenceRecord, weights: WeightResult) -> bool:
    a, b = weights.versions[0].get(first.weights_version), weights.versions[1].get(second.weights_version)
    return a is not None and a == b


def _with_fits(
    result: LogprobResult, fits: tuple[LogprobFit | None, LogprobFit | None], rescored: float | None
) -> LogprobResult:
    return LogprobResult(
        labels=result.labels,
        positions=result.positions,
        rollout=result.rollout,
        train=result.train,
        allowed=result.allowed,
        declared=result.declared,
        fits=fits,
        rescored=rescored,
        policy_moved=result.policy_moved,
    )
