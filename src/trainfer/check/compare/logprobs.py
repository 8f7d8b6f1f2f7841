"""Stage 4: the log-probs that both sides recorded, and what each side's own logits say of them.

Takes joined sequences and, where captured, the logits of the rows that predict response tokens; gives the
differences, what they may be, and for each side the reading of its logits (temperature, filters) that gives
what it recorded. |Δ log p| is at most twice the largest difference of the scaled logits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainfer.check.compare.records import LogprobFit, LogprobResult, Stage, Status
from trainfer.check.compare.temperatures import as_written, common_divisor, nearest_temperature
from trainfer.check.compare.tolerance import Tolerances
from trainfer.check.dump.records import Number, SequenceRecord
from trainfer.exact.logprobs import filtered_logprobs, row_sampling, token_logprobs
from trainfer.types import SamplingParams

Floats = NDArray[np.float64]
RowLogits = Mapping[tuple[int, int], Tensor]
"""(sequence, position) -> logits ``[V]`` of that row."""


def as_floats(numbers: Sequence[Number]) -> Floats:
    """Recorded numbers, where JSON has texts for what it cannot write."""
    return np.array([float(number) for number in numbers], dtype=np.float64)


def sampling_of(record: SequenceRecord) -> SamplingParams:
    """As applied to the recorded log-probs; what is not said is no filter and temperature 1."""
    said = record.sampling
    return SamplingParams(
        max_new_tokens=len(record.logprobs),
        temperature=float(said.get("temperature", 1.0)),
        top_k=int(said.get("top_k", -1)),
        top_p=float(said.get("top_p", 1.0)),
        min_p=float(said.get("min_p", 0.0)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTokens:
    """One side's response tokens that have captured logits.

    Axes: S tokens, V vocabulary.
    """

    logits_SV: Tensor
    targets_S: Tensor
    recorded_S: Floats
    sampling: tuple[SamplingParams, ...]
    """One per token."""
    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    """Of the scored token."""


def scored_tokens(records: Mapping[int, SequenceRecord], logits: RowLogits) -> ScoredTokens | None:
    """Put one side's recorded log-probs beside its logits; None where no logits were captured."""
    rows: list[Tensor] = []
    found: list[tuple[int, int, int, float, SamplingParams]] = []
    for index, record in records.items():
        sampling = sampling_of(record)
        for step, value in enumerate(as_floats(record.logprobs).tolist()):
            position = record.prompt_length + step
            row = logits.get((index, position - 1))
            if row is not None and record.tokens[position] < len(row):
                rows.append(row)
                found.append((index, position, record.tokens[position], value, sampling))
    if not rows:
        return None
    return ScoredTokens(
        logits_SV=torch.stack(rows),
        targets_S=torch.tensor([item[2] for item in found]),
        recorded_S=np.array([item[3] for item in found]),
        sampling=tuple(item[4] for item in found),
        sequences=tuple(item[0] for item in found),
        positions=tuple(item[1] for item in found),
    )


def derive(tokens: ScoredTokens, sampling: Sequence[SamplingParams]) -> Floats:
    """Log-probs of the targets under given sampling parameters, in float32 as both engines compute them."""
    rows = row_sampling(sampling, [1] * len(sampling), device="cpu")
    return filtered_logprobs(tokens.logits_SV, tokens.targets_S, rows).double().numpy()


def plain(tokens: ScoredTokens, temperature: float) -> Floats:
    """Log-probs of the targets at one temperature, no filter."""
    temperatures_S = torch.full((len(tokens.targets_S),), temperature)
    return token_logprobs(tokens.logits_SV, tokens.targets_S, temperatures_S).double().numpy()


def fit_reading(tokens: ScoredTokens, others: Sequence[float], tolerance: float) -> LogprobFit:
    """The reading of a side's own logits that gives what it recorded.

    Args:
        tokens: What it recorded, and its logits.
        others: Temperatures that the other side declared: they may be meant here too.
        tolerance: What rounding may do, in nats per nat.
    """
    declared = derive(tokens, tokens.sampling)
    own = tokens.sampling[0].temperature
    temperatures = sorted({own, *others} - {0.0, 1.0})
    readings: list[tuple[str, float, Floats]] = [
        ("declared", own, declared),
        ("raw", 1.0, plain(tokens, 1.0)),
        *(("scaled", t, plain(tokens, t)) for t in temperatures),
        *(("divided_after", t, plain(tokens, 1.0) / t) for t in temperatures),
    ]
    for name, temperature, derived in chain(readings, _later(tokens, len(declared))):
        if _worst(tokens.recorded_S, derived, tolerance) <= 1.0:
            return _fit(name, temperature, tokens, derived, declared)
    for temperature in dict.fromkeys((own or 1.0, 1.0)) if len(declared) >= _TOKENS_TO_FIT else ():
        width = _masked_width(tokens, temperature)
        derived = plain(_cut(tokens, width), temperature)
        if _worst(tokens.recorded_S, derived, tolerance) <= 1.0:
            return replace(_fit("cut", temperature, tokens, derived, declared), width=width)
    return _fit("unknown", own, tokens, declared, declared)


def _later(tokens: ScoredTokens, count: int) -> Iterator[tuple[str, float, Floats]]:
    """Asked for only where nothing declared fits."""
    if count >= _TOKENS_TO_FIT:
        yield from _fitted_readings(tokens)


def _fitted_readings(tokens: ScoredTokens) -> list[tuple[str, float, Floats]]:
    """Temperatures that neither side declared."""
    once = plain(tokens, 1.0)
    nearest = nearest_temperature(tokens.logits_SV, tokens.targets_S, tokens.recorded_S)
    divisor = common_divisor(once, tokens.recorded_S)
    divisors = [] if divisor is None else as_written(divisor)
    return [
        *(("scaled", value, plain(tokens, value)) for value in as_written(nearest)),
        *(("divided_after", value, once / value) for value in divisors),
    ]


_TOKENS_TO_FIT = 8
"""Fewer could agree on a width or a temperature by chance."""
_ROWS_FOR_WIDTH = 64


def _masked_width(tokens: ScoredTokens, temperature: float) -> int:
    """How many leading columns, if the rest was masked, come nearest to the recorded log-probs.

    log p = z_t − log Σ_{v < W} exp z_v gives the partial sum up to W in every row; W is where all rows agree best.
    """
    count = len(tokens.targets_S)
    chosen = torch.linspace(0, count - 1, min(count, _ROWS_FOR_WIDTH)).long()
    logits = tokens.logits_SV[chosen].double() / temperature
    targets = tokens.targets_S[chosen]
    sums = logits.gather(1, targets[:, None])[:, 0] - torch.from_numpy(tokens.recorded_S)[chosen]  # pyright: ignore[reportUnknownMemberType]
    off_V = (logits.logcumsumexp(1) - sums[:, None]).abs().nan_to_num(torch.inf).amax(0)
    first = int(tokens.targets_S.max())
    return first + int(off_V[first:].argmin()) + 1


def _fit(
    name: str, temperature: float, tokens: ScoredTokens, derived: Floats, declared: Floats
) -> LogprobFit:
    return LogprobFit(
        reading=name,
        temperature=temperature,
        worst=float(np.max(np.abs(tokens.recorded_S - derived), initial=0.0)),
        declared_worst=float(np.max(np.abs(tokens.recorded_S - declared), initial=0.0)),
        tokens=len(tokens.targets_S),
    )


def _worst(recorded: Floats, derived: Floats, tolerance: float) -> float:
    """Largest difference in units of what rounding may do; NaN never fits."""
    off = np.abs(recorded - derived) / (tolerance * (1 + np.abs(derived)))
    return float(np.max(np.nan_to_num(off, nan=np.inf), initial=0.0))


def rescored_mean(rollout: ScoredTokens, train: ScoredTokens) -> float | None:
    """Mean |d| once both sides' logits are read alike, over tokens that both have.

    Temperature 1, no filter, and as many columns as the narrower side has: a padded vocabulary takes no part.
    """
    width = min(rollout.logits_SV.shape[1], train.logits_SV.shape[1])
    first, second = (
        dict(
            zip(zip(side.sequences, side.positions, strict=True), plain(_cut(side, width), 1.0), strict=True)
        )
        for side in (rollout, train)
    )
    common = [abs(float(second[key] - first[key])) for key in first if key in second]
    return sum(common) / len(common) if common else None


def _cut(tokens: ScoredTokens, width: int) -> ScoredTokens:
    if tokens.logits_SV.shape[1] == width or int(tokens.targets_S.max()) >= width:
        return tokens
    return replace(tokens, logits_SV=tokens.logits_SV[:, :width])


def compare_logprobs(
    pairs: Sequence[tuple[int, SequenceRecord, SequenceRecord]],
    logit_difference: Mapping[tuple[int, int], float],
    model_dtype: str,
    tolerances: Tolerances,
    *,
    policy_moved: int,
) -> LogprobResult | None:
    """Difference per response token of sequences with equal ids.

    Args:
        pairs: (rollout index, rollout record, train record).
        logit_difference: (rollout sequence, position of the row) -> largest |difference| of its logits.
        model_dtype: The coarser one, in safetensors' names.
        tolerances: What rounding may do.
        policy_moved: Pairs that were left out.
    """
    labels: list[int] = []
    positions: list[int] = []
    rollout: list[Floats] = []
    train: list[Floats] = []
    for index, first, second in pairs:
        count = min(len(first.logprobs), len(second.logprobs))
        if count == 0 or first.prompt_length != second.prompt_length:
            continue
        labels += [index] * count
        positions += range(first.prompt_length, first.prompt_length + count)
        rollout.append(as_floats(first.logprobs[:count]))
        train.append(as_floats(second.logprobs[:count]))
    if not labels:
        return None
    a, b = np.concatenate(train), np.concatenate(rollout)
    temperatures = {index: min(_scale(first), _scale(second)) for index, first, second in pairs}
    loose = tolerances.logprobs.without_logits.get(
        model_dtype, max(tolerances.logprobs.without_logits.values())
    )
    tail = tolerances.logprobs.tail_units * tolerances.unit["F32"]
    known = [
        logit_difference.get((label, position - 1)) for label, position in zip(labels, positions, strict=True)
    ]
    allowed = [
        loose if off is None else 2 * off / temperatures[label] + tail * (1 + abs(value))
        for off, label, value in zip(known, labels, a.tolist(), strict=True)
    ]
    return LogprobResult(
        labels=np.array(labels, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        rollout=b,
        train=a,
        allowed=np.array(allowed),
        declared=(pairs[0][1].sampling, pairs[0][2].sampling),
        policy_moved=policy_moved,
    )


def _scale(record: SequenceRecord) -> float:
    temperature = sampling_of(record).temperature
    return temperature if temperature > 0 else 1.0


def judge_logprobs(
    result: LogprobResult, model_dtype: str, tolerances: Tolerances, *, proven_logits: bool
) -> Stage:
    """The stage's status: equal bits, within what the logits (or, if those are not proven, the dtype) allow, or neither."""
    off = np.abs(result.difference)
    count = len(off)
    mean, worst = float(np.mean(off)), float(np.max(off))
    text = f"{count} tokens: mean |Δ| {mean:.3g}, max {worst:.3g} nats"
    if not np.isfinite(off).all():
        odd = int(np.count_nonzero(~np.isfinite(off)))
        return Stage(name="logprobs", status=Status.DIVERGED, summary=f"{text}; {odd} tokens are not finite")
    if not off.any():
        return Stage(name="logprobs", status=Status.EQUAL, summary=f"{count} tokens have equal log-probs")
    too_far = bool((off > result.allowed).any())
    if not proven_logits:
        limits = tolerances.logprobs
        largest = limits.without_logits.get(model_dtype, max(limits.without_logits.values()))
        average = limits.without_logits_mean.get(model_dtype, max(limits.without_logits_mean.values()))
        too_far = too_far or worst > largest or mean > average
    return Stage(name="logprobs", status=Status.DIVERGED if too_far else Status.ROUNDING, summary=text)
