"""Do the policy that sampled and the policy that trains agree? Measured at every step, from log-probs alone.

Takes, per response token, the trainer's log-prob a and the rollout's log-prob b of the distribution
that was sampled (temperature and filters applied on both sides); gives the numbers worth logging.
It runs no model and names no cause: that is the other half's work.

Throughout d = a - b, rho = exp(d), and a mean is over response tokens unless it says sequences.
Everything is computed in float64 from exact float32 values.

============================================ ======================================================
metric                                       formula and source
============================================ ======================================================
mismatch/logp_abs_diff_{mean,max}            |d|
mismatch/k1, k2, k3                          mean(-d), mean(d^2 / 2), mean(exp(d) - d - 1): estimators
                                             of KL(rollout || trainer), Schulman 2020
mismatch/pearson                             correlation of a and b
mismatch/ess                                 (sum rho)^2 / (n sum rho^2), Kish; 1 is perfect
mismatch/abs_diff_by_prob_bin/LOW-HIGH       mean |d| of tokens with LOW <= exp(b) < HIGH: differences
                                             of probability hide rare tokens, where the damage is
mismatch/bitwise_equal_fraction              share of tokens with a == b, both finite
mismatch/tokens                              tokens that were compared
mismatch/nonfinite_tokens                    tokens with a or b not finite, e.g. one that the trainer's
                                             filter excludes; left out of every other number but
                                             the bitwise share, where they count as unequal
training/rollout_probs_diff_{max,mean,std}   of |exp a - exp b|, n-1 std (verl: calculate_debug_metrics)
training/rollout_actor_probs_pearson_corr    correlation of exp a and exp b (MiniMax-M1, arXiv 2506.13585)
rollout_corr/kl, k3_kl                       as k1, k3 (verl: compute_offpolicy_metrics, as all below)
rollout_corr/{training,rollout}_ppl          mean over sequences of exp(-mean a), exp(-mean b)
rollout_corr/{training,rollout}_log_ppl      mean over sequences of -mean a, -mean b
rollout_corr/log_ppl_{diff,abs_diff}         mean over sequences of D = mean b - mean a, and of |D|
rollout_corr/log_ppl_diff_{max,min}          extremes of D
rollout_corr/ppl_ratio                       mean over sequences of exp(D)
rollout_corr/chi2_token                      mean(rho^2) - 1, d clamped to ±20
rollout_corr/chi2_seq                        mean over sequences of exp(2 sum d) - 1, sum d clamped to ±20
============================================ ======================================================

A number that is undefined (a correlation of constants, a bin without tokens) is left out.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PROBABILITY_BINS = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Edges of the bins of ``mismatch/abs_diff_by_prob_bin``; the last bin holds 1.0."""
LOG_RATIO_LIMIT = 20.0
"""verl's clamp of exponents in the chi-squared estimates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAgreement:
    """Log-prob space, per token: ``mismatch/*``.

    Example: a = [-1.0, -2.0], b = [-1.0, -2.5] gives ``abs_diff_mean=0.25, abs_diff_max=0.5,
    k1=-0.25, bitwise_equal_fraction=0.5``.
    """

    tokens: int
    """Finite on both sides."""
    nonfinite_tokens: int
    abs_diff_mean: float
    abs_diff_max: float
    k1: float
    k2: float
    k3: float
    pearson: float
    ess: float
    abs_diff_by_bin: tuple[float, ...]
    """One per bin of ``PROBABILITY_BINS``; NaN without tokens."""
    bitwise_equal_fraction: float

    def metrics(self) -> dict[str, float]:
        """By metric name; what is undefined is left out."""
        bins = itertools.pairwise(PROBABILITY_BINS)
        return {
            "mismatch/logp_abs_diff_mean": self.abs_diff_mean,
            "mismatch/logp_abs_diff_max": self.abs_diff_max,
            "mismatch/k1": self.k1,
            "mismatch/k2": self.k2,
            "mismatch/k3": self.k3,
            "mismatch/ess": self.ess,
            "mismatch/bitwise_equal_fraction": self.bitwise_equal_fraction,
            "mismatch/nonfinite_tokens": float(self.nonfinite_tokens),
            **_defined({"mismatch/pearson": self.pearson}),
            **_defined(
                {
                    f"mismatch/abs_diff_by_prob_bin/{low:g}-{high:g}": mean
                    for (low, high), mean in zip(bins, self.abs_diff_by_bin, strict=True)
                }
            ),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityAgreement:
    """Probability space, per token: verl's ``training/rollout_*``."""

    diff_max: float
    diff_mean: float
    diff_std: float
    pearson: float

    def metrics(self) -> dict[str, float]:
        """By metric name; what is undefined is left out."""
        return {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": self.diff_max,
            "training/rollout_probs_diff_mean": self.diff_mean,
            **_defined(
                {
                    "training/rollout_probs_diff_std": self.diff_std,
                    "training/rollout_actor_probs_pearson_corr": self.pearson,
                }
            ),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGap:
    """Off-policy diagnostics, per token and per sequence: verl's ``rollout_corr/*``."""

    kl: float
    k3_kl: float
    training_ppl: float
    rollout_ppl: float
    training_log_ppl: float
    rollout_log_ppl: float
    log_ppl_diff: float
    log_ppl_abs_diff: float
    log_ppl_diff_max: float
    log_ppl_diff_min: float
    ppl_ratio: float
    chi2_token: float
    chi2_seq: float

    def metrics(self) -> dict[str, float]:
        """By metric name."""
        return {f"rollout_corr/{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """All of it, for one step."""

    tokens: TokenAgreement
    probabilities: ProbabilityAgreement
    gap: PolicyGap

    def metrics(self) -> dict[str, float]:
        """By metric name."""
        return {**self.tokens.metrics(), **self.probabilities.metrics(), **self.gap.metrics()}


def measure(
    trainer_logprobs: Sequence[Sequence[float]], rollout_logprobs: Sequence[Sequence[float]]
) -> Agreement | None:
    """Compare the two sides, one ragged row of floats per sequence; None where no token is finite.

    Both sides must have the same sequences, in the same order, with as many tokens.
    """
    lengths = [len(row) for row in trainer_logprobs]
    assert lengths == [len(row) for row in rollout_logprobs], "the two sides score other tokens"
    total = sum(lengths)
    a = np.fromiter(itertools.chain.from_iterable(trainer_logprobs), np.float64, total)
    b = np.fromiter(itertools.chain.from_iterable(rollout_logprobs), np.float64, total)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    finite = np.isfinite(a) & np.isfinite(b)
    nonfinite = total - int(finite.sum())
    if nonfinite == total:
        return None
    a, b, owner = a[finite], b[finite], owner[finite]
    return Agreement(
        tokens=_token_agreement(a, b, nonfinite_tokens=nonfinite),
        probabilities=_probability_agreement(np.exp(a), np.exp(b)),
        gap=_policy_gap(a, b, owner),
    )


def agreement_metrics(
    trainer_logprobs: Sequence[Sequence[float] | None], rollout_logprobs: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Metrics over the sequences that the trainer has scored (None: it has not), and how many tokens that was."""
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(trainer_logprobs, rollout_logprobs, strict=True)
        if ours is not None
    ]
    compared = {"mismatch/tokens": float(sum(len(ours) for ours, _ in pairs))}
    agreement = measure([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
    if agreement is None:
        unequal = {"mismatch/bitwise_equal_fraction": 0.0} if compared["mismatch/tokens"] else {}
        return {**compared, **unequal, "mismatch/nonfinite_tokens": compared["mismatch/tokens"]}
    return {**compared, **agreement.metrics()}


def _token_agreement(a: Floats, b: Floats, *, nonfinite_tokens: int) -> TokenAgreement:
    d = a - b
    abs_d = np.abs(d)
    # Dividing by the largest ratio first keeps the squares finite; the quotient does not change.
    rho = np.exp(d - d.max())
    bins = np.clip(
        np.searchsorted(PROBABILITY_BINS, np.exp(b), side="right") - 1, 0, len(PROBABILITY_BINS) - 2
    )
    by_bin = [abs_d[bins == i] for i in range(len(PROBABILITY_BINS) - 1)]
    return TokenAgreement(
        tokens=len(d),
        nonfinite_tokens=nonfinite_tokens,
        abs_diff_mean=float(abs_d.mean()),
        abs_diff_max=float(abs_d.max()),
        k1=float((b - a).mean()),
        k2=float(0.5 * np.square(d).mean()),
        k3=_k3(d),
        pearson=_pearson(a, b),
        ess=float(rho.sum() ** 2 / (len(rho) * np.square(rho).sum())),
        abs_diff_by_bin=tuple(float(part.mean()) if len(part) else math.nan for part in by_bin),
        bitwise_equal_fraction=float((a == b).sum() / (len(d) + nonfinite_tokens)),
    )


def _probability_agreement(p: Floats, q: Floats) -> ProbabilityAgreement:
    diff = np.abs(p - q)
    return ProbabilityAgreement(
        diff_max=float(diff.max()),
        diff_mean=float(diff.mean()),
        diff_std=float(diff.std(ddof=1)) if len(diff) > 1 else math.nan,
        pearson=_pearson(p, q),
    )


def _policy_gap(a: Floats, b: Floats, owner: NDArray[np.intp]) -> PolicyGap:
    d = a - b
    # A sequence without a finite token has no mean; it drops out here.
    _, starts, counts = np.unique(owner, return_index=True, return_counts=True)
    mean_a = np.add.reduceat(a, starts) / counts
    mean_b = np.add.reduceat(b, starts) / counts
    sum_d = np.add.reduceat(d, starts)
    log_ppl_diff = mean_b - mean_a
    return PolicyGap(
        kl=float((b - a).mean()),
        k3_kl=_k3(d),
        training_ppl=float(np.exp(-mean_a).mean()),
        rollout_ppl=float(np.exp(-mean_b).mean()),
        training_log_ppl=float(-mean_a.mean()),
        rollout_log_ppl=float(-mean_b.mean()),
        log_ppl_diff=float(log_ppl_diff.mean()),
        log_ppl_abs_diff=float(np.abs(log_ppl_diff).mean()),
        log_ppl_diff_max=float(log_ppl_diff.max()),
        log_ppl_diff_min=float(log_ppl_diff.min()),
        ppl_ratio=float(np.exp(log_ppl_diff).mean()),
        chi2_token=float(np.exp(2 * d.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).mean() - 1),
        chi2_seq=float(np.exp(2 * sum_d.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).mean() - 1),
    )


def _k3(d: Floats) -> float:
    # expm1 keeps the digits that exp(d) - 1 loses where d is small.
    return float((np.expm1(d) - d).mean())


def _pearson(x: Floats, y: Floats) -> float:
    x_centred, y_centred = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(np.square(x_centred).sum()) * float(np.square(y_centred).sum()))
    return float((x_centred * y_centred).sum() / scale) if scale > 0 else math.nan


def _defined(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
