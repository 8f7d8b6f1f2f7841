"""What comes after the modules: recorded log-probs, and whether they stand beside their own tokens.

Takes both sides' sequences and logits; gives the log-prob stage, and what it adds to the tokens stage. The arithmetic
is in ``logprobs``, the reading of logits in ``logits``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainfer.check.align.points import SidePoints
from trainfer.check.compare.judge import Judged
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
from trainfer.check.compare.records import LogprobFit, LogprobResult, Stage, Status, TokenFinding
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.tables import RowPlans
from trainfer.check.compare.tokens import TokenResult
from trainfer.check.compare.tolerance import Tolerances
from trainfer.check.compare.weights import WeightResult
from trainfer.check.dump.records import SequenceRecord

SIDES = ("rollout", "train")
Records = Mapping[int, SequenceRecord]
"""Index into the rollout's sequences -> a side's record of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TailFacts:
    """What the stages before left behind."""

    sides: tuple[ReadableSide, ReadableSide]
    tokens: TokenResult
    weights: WeightResult
    points: tuple[SidePoints, SidePoints]
    plans: RowPlans


@dataclass(frozen=True, kw_only=True, slots=True)
class TailResult:
    """What was found."""

    logprobs: LogprobResult | None
    misplaced: tuple[TokenFinding, ...]
    model_dtype: str
    with_logits: bool


def examine_tail(facts: TailFacts, judged: Judged, limits: Tolerances) -> TailResult:
    """Compare log-probs, and each side's with its own logits."""
    dtype = _coarsest(facts, judged, limits)
    own = _own_records(facts.tokens)
    differences = _logit_differences(facts)
    scored, misplaced = _score_sides(facts, own, limits)
    rollout, train = facts.tokens.sequences
    pairs = [pair for pair in facts.tokens.join.pairs if pair.equal]
    together = [
        (pair.rollout, rollout[pair.rollout], train[pair.train])
        for pair in pairs
        if _same_policy(rollout[pair.rollout], train[pair.train], facts.weights)
    ]
    moved = len(pairs) - len(together)
    result = compare_logprobs(together, differences, dtype, limits, policy_moved=moved)
    if result is not None:
        result = replace(result, fits=_fits(scored, own, limits), rescored=_rescored(scored))
    return TailResult(
        logprobs=result, misplaced=tuple(misplaced), model_dtype=dtype, with_logits=bool(differences)
    )


def _coarsest(facts: TailFacts, judged: Judged, limits: Tolerances) -> str:
    """The coarsest dtype that was compared, else that the models are stored in."""
    seen = {dtype for result in judged.points for dtype in result.dtypes if dtype in limits.unit}
    stored = {side.manifest.model_dtype for side in facts.sides if side.manifest.model_dtype in limits.unit}
    return max(seen or stored, key=lambda dtype: limits.unit[dtype], default="F32")


def _own_records(tokens: TokenResult) -> tuple[Records, Records]:
    rollout, train = tokens.sequences
    joined = {pair.rollout: train[pair.train] for pair in reversed(tokens.join.pairs)}
    return (
        {index: record for index, record in enumerate(rollout) if record.logprobs},
        {
            index: record
            for index, record in sorted(joined.items(), key=lambda item: item[1].index)
            if record.logprobs
        },  # in the train side's own order: who follows whom in its batch
    )


def _logit_differences(facts: TailFacts) -> dict[tuple[int, int], float]:
    places = [logits_point(points.sources) for points in facts.points]
    if places[0] is None or places[1] is None:
        return {}
    sources = facts.points[0].sources[places[0]], facts.points[1].sources[places[1]]
    return largest_differences(facts.sides, sources, facts.plans)


def _tail(limits: Tolerances) -> float:
    """What rounding may do to a log-softmax, in nats per nat."""
    return 4 * limits.logprobs.tail_units * limits.unit["F32"]


def _score_sides(
    facts: TailFacts, own: tuple[Records, Records], limits: Tolerances
) -> tuple[list[ScoredTokens | None], list[TokenFinding]]:
    """Each side's log-probs beside its logits; those that stand at other tokens."""
    scored: list[ScoredTokens | None] = []
    misplaced: list[TokenFinding] = []
    for side, name, points, records in zip(facts.sides, SIDES, facts.points, own, strict=True):
        place = logits_point(points.sources)
        if place is None or not records:
            scored.append(None)
            continue
        logits = read_logits(side, name, points.sources[place], facts.plans, records)
        found = scored_tokens(records, logits)
        scored.append(found)
        if found is not None and fit_reading(found, (), _tail(limits)).reading == "unknown":
            misplaced += misplaced_logprobs(name, records, logits, _tail(limits))
    return scored, misplaced


def _fits(
    scored: list[ScoredTokens | None], own: tuple[Records, Records], limits: Tolerances
) -> tuple[LogprobFit | None, LogprobFit | None]:
    declared = [sorted({sampling_of(record).temperature for record in records.values()}) for records in own]
    fits = [
        None if item is None else fit_reading(item, declared[1 - side], _tail(limits))
        for side, item in enumerate(scored)
    ]
    return fits[0], fits[1]


def _rescored(scored: list[ScoredTokens | None]) -> float | None:
    if scored[0] is None or scored[1] is None:
        return None
    return rescored_mean(scored[0], scored[1])


def _same_policy(first: SequenceRecord, second: SequenceRecord, weights: WeightResult) -> bool:
    a, b = weights.versions[0].get(first.weights_version), weights.versions[1].get(second.weights_version)
    return a is not None and a == b


def tokens_stage(stage: Stage, tail: TailResult) -> Stage:
    """The tokens stage, after log-probs were held against logits."""
    if not tail.misplaced:
        return stage
    text = f"log-probs of {len(tail.misplaced)} sequences stand beside other tokens: {tail.misplaced[0].note}"
    return Stage(name="tokens", status=Status.DIVERGED, summary=text)


def logprob_stage(tail: TailResult, behind: Status, limits: Tolerances, *, weights_differ: bool) -> Stage:
    """The log-prob stage, behind a module stage with that status; not judged behind weights that differ."""
    if tail.logprobs is None:
        text = "no sequence has log-probs on both sides under one policy"
        return Stage(name="logprobs", status=Status.NOT_CHECKED, summary=text)
    proven = tail.with_logits and behind in (Status.EQUAL, Status.ROUNDING)
    judged = judge_logprobs(tail.logprobs, tail.model_dtype, limits, proven_logits=proven)
    if weights_differ and behind is Status.NOT_CHECKED and judged.status is Status.DIVERGED:
        text = f"{judged.summary}; not judged: weights differ"
        return Stage(name="logprobs", status=Status.NOT_CHECKED, summary=text)
    return judged
