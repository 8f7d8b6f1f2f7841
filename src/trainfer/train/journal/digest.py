"""A run in a few numbers, from metrics.jsonl alone.

Takes (step, metrics) pairs in the file's order; gives a ``RunDigest``. Used by the closing summary; a damaged
or missing file gives None. Keeps two floats a step in memory.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

SCORE = "critic/score/mean"
NEAR_MISSES = "critic/score/near_misses"
DIFF_MAX = "mismatch/logp_abs_diff_max"
BITWISE = "mismatch/bitwise_equal_fraction"
FINGERPRINT = "weights/fingerprint_match"
COMPARED = "mismatch/tokens"
STEP_SECONDS = "timing_s/step"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDigest:
    """What a run reached.

    Example: 8 steps with scores 0.1 0.2 … 0.8 have ``first_score=0.15`` and ``last_score=0.75``.
    """

    last_step: int
    num_steps: int
    seconds: float
    first_score: float | None
    """Mean over the first quarter of the steps (at least one)."""
    last_score: float | None
    near_misses: int
    """Responses with the right answer in a form that scores 0, of ``num_responses``."""
    num_responses: int
    diff_max: float | None
    """Largest |Δlogp| of any token of any step; None where it was not measured."""
    bitwise_fraction: float | None
    """Share of the compared tokens whose two log-probs are the same float."""
    compared_tokens: int
    """Response tokens whose two log-probs were compared."""
    proven_syncs: int
    """Steps whose weight fingerprints all agreed, of ``checked_syncs``."""
    checked_syncs: int


def compared_tokens(metrics: Mapping[str, float]) -> int:
    """Of one step; 0 where it did not say."""
    tokens = metrics.get(COMPARED, 0.0)
    return round(tokens) if math.isfinite(tokens) else 0


def num_sequences(metrics: Mapping[str, float]) -> int:
    """Sequences of a step: all tokens over their mean number; 0 where the step did not say."""
    total, mean = metrics.get("perf/total_num_tokens", 0.0), metrics.get("global_seqlen/mean", 0.0)
    count = total / mean if mean > 0 else 0.0
    return round(count) if math.isfinite(count) else 0


def digest(steps: Iterable[tuple[int, Mapping[str, float]]]) -> RunDigest | None:
    """Sum a run up; None when it has no step."""
    scores: list[float] = []
    diffs: list[float] = []
    bitwise: list[tuple[int, float]] = []
    last_step = num_steps = tokens = proven = checked = near_misses = responses = 0
    seconds = 0.0
    for step, metrics in steps:
        if step == 0:  # validation before training
            continue
        last_step, num_steps = step, num_steps + 1
        seconds += metrics.get(STEP_SECONDS, 0.0)
        step_tokens = compared_tokens(metrics)
        tokens += step_tokens
        near_misses += round(metrics.get(NEAR_MISSES, 0.0))
        responses += num_sequences(metrics)
        if SCORE in metrics:
            scores.append(metrics[SCORE])
        if DIFF_MAX in metrics:
            diffs.append(metrics[DIFF_MAX])
        if BITWISE in metrics:
            bitwise.append((step_tokens, metrics[BITWISE]))
        if FINGERPRINT in metrics:
            checked += 1
            proven += metrics[FINGERPRINT] == 1.0
    if num_steps == 0:
        return None
    quarter = max(1, len(scores) // 4)
    return RunDigest(
        last_step=last_step,
        num_steps=num_steps,
        seconds=seconds,
        first_score=fmean(scores[:quarter]) if scores else None,
        last_score=fmean(scores[-quarter:]) if scores else None,
        near_misses=near_misses,
        num_responses=responses,
        diff_max=_largest(diffs),
        bitwise_fraction=_weighted(bitwise),
        compared_tokens=tokens,
        proven_syncs=proven,
        checked_syncs=checked,
    )


def _largest(values: list[float]) -> float | None:
    """NaN wins: a difference that is not a number is not agreement."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values, default=None)


def _weighted(pairs: list[tuple[int, float]]) -> float | None:
    total = sum(weight for weight, _ in pairs)
    if total == 0:
        return fmean(value for _, value in pairs) if pairs else None
    return sum(weight * value for weight, value in pairs) / total
