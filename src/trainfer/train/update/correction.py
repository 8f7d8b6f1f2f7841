"""Rollout correction: importance weights of the trained policy over the one that sampled.

Takes, per response token, the trainer's old log-prob and the rollout's; gives one weight per token,
without gradient, and what is worth logging. It rejects no sequence and changes no loss: ``loss.py``
multiplies the weights in.

Truncated importance sampling (Ionides 2008) or, with a lower bound, IcePop (weights outside the bounds
become 0), as verl's ``algorithm.rollout_correction.rollout_is``.
"""

import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LOG_RATIO_LIMIT = 20.0
"""verl clamps log-ratios to ±20 before exponentiating."""


class ImportanceLevel(enum.Enum):
    """What one weight is for: verl's ``rollout_is``."""

    TOKEN = "token"
    """exp(old - rollout) of the token: low variance, biased."""
    SEQUENCE = "sequence"
    """The product over the sequence's tokens, for each of them: unbiased, high variance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBounds:
    """Which weights are let through.

    Example: ``upper=2.0`` turns a weight of 3.0 into 2.0; ``lower=0.5, upper=2.0`` turns 3.0 and 0.4 into 0.0.
    """

    upper: float
    lower: float | None = None

    @classmethod
    def parse(cls, text: float | str) -> "WeightBounds":
        """Read verl's ``rollout_is_threshold``: a number, or ``"low_high"``.

        Raises:
            ValueError: neither.
        """
        numbers = [float(part) for part in str(text).split("_")]
        if len(numbers) > 2 or not 0 < numbers[0] <= numbers[-1] < math.inf:
            raise ValueError(f"{text!r} is not a positive number or an ascending pair low_high")
        return cls(upper=numbers[-1], lower=numbers[0] if len(numbers) == 2 else None)

    def apply(self, raw: Floats) -> Floats:
        """Truncate, or drop what lies outside."""
        if self.lower is None:
            return np.minimum(raw, self.upper)
        return np.where((raw >= self.lower) & (raw <= self.upper), raw, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutWeights:
    """Weights and their statistics.

    Example: level token, log-ratios [0.0, 1.0] and upper bound 2.0 give weights [1.0, 2.0].
    """

    weights: tuple[tuple[float, ...], ...]
    """One row per sequence, one float per response token."""
    statistics: Mapping[str, float]
    """Under verl's names (``rollout_corr/rollout_is_*``), taken before batch normalisation. The high and
    low fractions are of weights before the bounds, per token or per sequence as the level is."""


def rollout_weights(
    old_logprobs: Sequence[Sequence[float]],
    rollout_logprobs: Sequence[Sequence[float]],
    *,
    level: ImportanceLevel,
    bounds: WeightBounds,
    normalise: bool = False,
) -> RolloutWeights:
    """Bounded exp(old - rollout), per token or per sequence.

    Args:
        old_logprobs: One row of floats per sequence, at least one token each.
        rollout_logprobs: Likewise, of the same tokens.
        level: What one weight is for.
        bounds: Which weights are let through.
        normalise: Divide by the mean weight of the batch (over tokens, or over sequences).
    """
    lengths = np.array([len(row) for row in old_logprobs])
    assert [len(row) for row in rollout_logprobs] == lengths.tolist(), "the two sides score other tokens"
    total = int(lengths.sum())
    log_ratio = np.fromiter(itertools.chain.from_iterable(old_logprobs), np.float64, total)
    log_ratio -= np.fromiter(itertools.chain.from_iterable(rollout_logprobs), np.float64, total)
    starts = np.cumsum(lengths) - lengths
    if level is ImportanceLevel.SEQUENCE:
        log_ratio = np.add.reduceat(log_ratio, starts)
    raw = np.exp(log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    bounded = bounds.apply(raw)
    statistics = _extremes(log_ratio, raw, bounded, level, bounds)
    if level is ImportanceLevel.SEQUENCE:
        raw, per_token = np.repeat(raw, lengths), np.repeat(bounded, lengths)
    else:
        per_token = bounded
    statistics |= _spread(per_token) | _by_sequence(raw, per_token, starts, lengths, bounds)
    if bounds.lower is not None:
        outside = (raw < bounds.lower) | (raw > bounds.upper)
        statistics["rollout_is_oob_ratio"] = float(outside.mean())
    if normalise:
        factor = float(bounded.mean())
        factor = factor if factor > 1e-8 else 1.0
        per_token = per_token / factor
        statistics["rollout_is_batch_norm_factor"] = factor
    return RolloutWeights(
        weights=_rows(per_token, lengths),
        statistics={f"rollout_corr/{name}": value for name, value in statistics.items()},
    )


def _lower(bounds: WeightBounds) -> float:
    return 1.0 / bounds.upper if bounds.lower is None else bounds.lower


def _extremes(
    log_ratio: Floats, raw: Floats, bounded: Floats, level: ImportanceLevel, bounds: WeightBounds
) -> dict[str, float]:
    """As in verl: of the bounded weights per token, of the products themselves per sequence."""
    if level is ImportanceLevel.TOKEN:
        largest, smallest = float(bounded.max()), float(bounded.min())
    else:
        largest = math.exp(min(float(log_ratio.max()), LOG_RATIO_LIMIT))
        smallest = math.exp(float(log_ratio.min()))
    return {
        "rollout_is_max": largest,
        "rollout_is_min": smallest,
        "rollout_is_ratio_fraction_high": float((raw > bounds.upper).mean()),
        "rollout_is_ratio_fraction_low": float((raw < _lower(bounds)).mean()),
    }


def _spread(per_token: Floats) -> dict[str, float]:
    mean = float(per_token.mean())
    square = float(np.square(per_token).mean())
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": float(per_token.std()),
        # 1 / mean of the squared weights after division by their mean.
        "rollout_is_eff_sample_size": mean**2 / square if square > 0 else 0.0,
    }


def _by_sequence(
    raw: Floats, per_token: Floats, starts: NDArray[np.int_], lengths: NDArray[np.int_], bounds: WeightBounds
) -> dict[str, float]:
    means = np.add.reduceat(per_token, starts) / lengths
    raw_means = np.add.reduceat(raw, starts) / lengths
    return {
        "rollout_is_seq_mean": float(means.mean()),
        "rollout_is_seq_std": float(means.std(ddof=1)) if len(means) > 1 else 0.0,
        "rollout_is_seq_max": float(means.max()),
        "rollout_is_seq_min": float(means.min()),
        "rollout_is_seq_max_deviation": float(np.abs(means - 1.0).max()),
        "rollout_is_seq_fraction_high": float((raw_means > bounds.upper).mean()),
        "rollout_is_seq_fraction_low": float((raw_means < _lower(bounds)).mean()),
    }


def _rows(values: Floats, lengths: NDArray[np.int_]) -> tuple[tuple[float, ...], ...]:
    flat = values.tolist()
    ends = np.cumsum(lengths).tolist()
    return tuple(tuple(flat[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True))
