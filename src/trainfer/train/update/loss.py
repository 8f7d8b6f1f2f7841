"""Clipped policy-gradient loss of one micro-batch, with entropy bonus and KL term.

Takes log-probs, advantages and weights that are already aligned to the same tokens; gives a
scalar loss and sums worth logging. It runs no model, shifts nothing, pads nothing and reduces
over no ranks: see ``trainer.py``.

Axes: S scored rows (response tokens of the micro-batch, sequence after sequence).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trainfer.train.update.kl import LOG_RATIO_LIMIT, KlEstimator, token_kl


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """The constants of the loss, under verl's names and defaults."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    """Dual clip: a token with negative advantage loses at most this times |advantage|."""
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    """0 leaves the KL term out."""
    kl_estimator: KlEstimator = KlEstimator.K3
    kl_straight_through: bool = False
    """verl's trailing ``+``: the estimator's value with k2's gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """What the loss needs to know about one micro-batch.

    Example: one sequence whose two response tokens share advantage 1.0 in a mini-batch of four
    trained tokens has ``advantages_S = [1.0, 1.0]``, ``mask_S = [True, True]`` and, for
    token-mean, ``token_weights_S = [0.25, 0.25]``.
    """

    logprobs_S: Float[Tensor, " S"]
    """Policy being trained; carries the gradient."""
    old_logprobs_S: Float[Tensor, " S"]
    """Policy at the start of the step, or the one that sampled (bypass mode)."""
    advantages_S: Float[Tensor, " S"]
    mask_S: Bool[Tensor, " S"]
    """True where a token trains."""
    token_weights_S: Float[Tensor, " S"]
    """Factor of each token's loss in the mini-batch's loss (see ``aggregate.py``)."""
    entropies_S: Float[Tensor, " S"]
    """Entropy of the distribution at each row; needs a gradient only where ``entropy_coeff`` is not 0."""
    ref_logprobs_S: Float[Tensor, " S"] | None = None
    rollout_weights_S: Float[Tensor, " S"] | None = None
    """Importance weights old policy / rollout policy; None is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """The loss and its by-products, all detached but ``loss``.

    Each field adds over micro-batches and ranks to the mini-batch's. The last three are plain
    sums over trained tokens: divide by the mini-batch's trained tokens.
    """

    loss: Float[Tensor, ""]
    pg_loss: Float[Tensor, ""]
    entropy: Float[Tensor, ""]
    kl_loss: Float[Tensor, ""]
    ppo_kl_sum: Float[Tensor, ""]
    """Sum of old - new log-prob: the k1 estimate of KL(old || new)."""
    clipped_tokens: Float[Tensor, ""]
    """Tokens at which the clipped term was the larger loss."""
    clipped_lower_tokens: Float[Tensor, ""]
    """Tokens at which dual clip bounded the loss."""


def grpo_loss(inputs: LossInputs, settings: LossSettings) -> LossOutputs:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated, with dual clip.

    Dual clip is Ye et al. 2020 (arXiv 1912.09729), eq. 5; clip-higher separates the two bounds
    (DAPO, arXiv 2503.14476, eq. 10). The log-ratio is clamped to ±20 as verl does, so a token
    beyond that has no gradient.
    """
    mask_S = inputs.mask_S
    weights_S = inputs.token_weights_S * mask_S
    policy_loss_S, by_products = _clipped_surrogate(inputs, settings)
    if inputs.rollout_weights_S is not None:
        policy_loss_S = policy_loss_S * inputs.rollout_weights_S
    pg_loss = _weighted_sum(policy_loss_S, weights_S, mask_S)
    entropy = _weighted_sum(inputs.entropies_S, weights_S, mask_S)
    loss = pg_loss
    if settings.entropy_coeff != 0.0:
        loss = loss - settings.entropy_coeff * entropy
    kl_loss = torch.zeros_like(pg_loss)
    if inputs.ref_logprobs_S is not None:
        kl_S = token_kl(
            inputs.logprobs_S,
            inputs.ref_logprobs_S,
            settings.kl_estimator,
            straight_through=settings.kl_straight_through,
        )
        kl_loss = _weighted_sum(kl_S, weights_S, mask_S)
        loss = loss + settings.kl_loss_coef * kl_loss
    log_ratio_S, clipped_S, clipped_lower_S = by_products
    return LossOutputs(
        loss=loss,
        pg_loss=pg_loss.detach(),
        entropy=entropy.detach(),
        kl_loss=kl_loss.detach(),
        ppo_kl_sum=-log_ratio_S.detach()[mask_S].sum(),
        clipped_tokens=(clipped_S & mask_S).sum().to(pg_loss.dtype),
        clipped_lower_tokens=(clipped_lower_S & mask_S).sum().to(pg_loss.dtype),
    )


def _clipped_surrogate(
    inputs: LossInputs, settings: LossSettings
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Loss per token, and (log-ratio, where clipped, where clipped by dual clip) per token."""
    advantages_S = inputs.advantages_S
    log_ratio_S = (inputs.logprobs_S - inputs.old_logprobs_S).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_S = torch.exp(log_ratio_S)
    plain_S = -advantages_S * ratio_S
    bounded_S = -advantages_S * ratio_S.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    ppo_S = torch.maximum(plain_S, bounded_S)
    ceiling_S = -advantages_S * settings.clip_ratio_c
    negative_S = advantages_S < 0
    loss_S = torch.where(negative_S, torch.minimum(ppo_S, ceiling_S), ppo_S)
    clipped_S = bounded_S > plain_S
    clipped_lower_S = (ppo_S > ceiling_S) & negative_S
    return loss_S, (log_ratio_S, clipped_S, clipped_lower_S)


def _weighted_sum(values_S: Tensor, weights_S: Tensor, mask_S: Tensor) -> Tensor:
    # A masked token may hold anything, inf and NaN included; 0 * inf would be NaN.
    return (values_S.masked_fill(~mask_S, 0.0) * weights_S).sum()
