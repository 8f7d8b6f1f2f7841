"""KL estimators of the trained policy against the frozen ref, one value per token.

Takes log-probs of the sampled tokens; gives a per-token estimate that carries the gradient of
the trained policy. It masks nothing and sums nothing: see ``loss.py``.

With x drawn from the trained policy p and r = q(x) / p(x) for the ref q (Schulman, "Approximating
KL divergence", 2020): k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r.

Axes: S scored rows (response tokens).
"""

import enum
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""verl clamps the log-ratio to ±20 before exponentiating, so that one token cannot overflow."""
K3_LIMIT = 10.0
"""verl clamps k3 itself to ±10."""


class KlEstimator(enum.Enum):
    """verl's ``kl_loss_type`` values; aliases share a member."""

    K1 = "k1"
    """log p - log q. Unbiased as a value; its gradient is the score function, zero in expectation."""
    ABS = "abs"
    """|log p - log q|."""
    K2 = "k2"
    """(log p - log q)^2 / 2. Its gradient is the unbiased gradient of the reverse KL."""
    K3 = "k3"
    """r - 1 - log r, never negative, with verl's two clamps."""

    @classmethod
    def of(cls, name: str) -> "KlEstimator":
        """Accept verl's names: kl, k1, abs, mse, k2, low_var_kl, k3 (a trailing ``+`` is not part of it)."""
        return cls({"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name, name))


def token_kl(
    logprobs_S: Float[Tensor, " S"],
    ref_logprobs_S: Float[Tensor, " S"],
    estimator: KlEstimator,
    *,
    straight_through: bool = False,
) -> Float[Tensor, " S"]:
    """One KL estimate per token, in nats.

    ``straight_through`` (verl's trailing ``+``, as in ``k3+``) keeps the value and takes k2's gradient.

    Args:
        logprobs_S: Log-probs of the trained policy; carries the gradient.
        ref_logprobs_S: Log-probs of the ref, no gradient.
        estimator: Which estimator.
        straight_through: Gradient of k2 in place of the estimator's own.
    """
    value_S = _estimate(logprobs_S, ref_logprobs_S, estimator)
    if not straight_through:
        return value_S
    k2_S = _estimate(logprobs_S, ref_logprobs_S, KlEstimator.K2)
    return k2_S - k2_S.detach() + value_S.detach()


def sequence_kl(
    logprobs: Sequence[Sequence[float]], ref_logprobs: Sequence[Sequence[float]], estimator: KlEstimator
) -> list[float]:
    """Sum of the token estimates of each sequence, without gradient: the KL penalty inside a reward."""
    sums: list[float] = []
    for row, ref_row in zip(logprobs, ref_logprobs, strict=True):
        kl_S = token_kl(
            torch.tensor(row, dtype=torch.float64), torch.tensor(ref_row, dtype=torch.float64), estimator
        )
        sums.append(kl_S.sum().item())
    return sums


def _estimate(logprobs_S: Tensor, ref_logprobs_S: Tensor, estimator: KlEstimator) -> Tensor:
    difference_S = logprobs_S - ref_logprobs_S
    match estimator:
        case KlEstimator.K1:
            return difference_S
        case KlEstimator.ABS:
            return difference_S.abs()
        case KlEstimator.K2:
            return 0.5 * difference_S.square()
        case KlEstimator.K3:
            log_ratio_S = (-difference_S).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return (torch.exp(log_ratio_S) - log_ratio_S - 1).clamp(-K3_LIMIT, K3_LIMIT)
