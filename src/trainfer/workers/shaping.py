"""Scores and log-probs of a step -> what the update trains on, as the configuration says.

Takes scored sequences and the passes that were made; gives training sequences with advantages, old and ref
log-probs and importance weights. The formulas are ``train``'s; which of them apply is decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainfer.config.schema import TrainConfig
from trainfer.errors import EngineError
from trainfer.train.advantage import group_advantages
from trainfer.train.reward.registry import count_near_misses
from trainfer.train.update.batch import training_sequences
from trainfer.train.update.correction import ImportanceLevel, WeightBounds, rollout_weights
from trainfer.train.update.kl import KlEstimator, sequence_kl
from trainfer.train.update.kl_control import KlControl
from trainfer.types import SampledSequence, TokenScores, TrainingSequence
from trainfer.workers.settings import OldLogProbs, Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedStep:
    """What the update gets."""

    rewards: tuple[float, ...]
    """Scores, less the KL penalty where the reward holds one."""
    advantages: tuple[float, ...]
    training: tuple[TrainingSequence, ...]
    metrics: dict[str, float]
    """Near misses; the KL penalty and the importance weights, where there are any."""


def shape(
    config: TrainConfig,
    stages: Stages,
    sequences: Sequence[SampledSequence],
    scores: Sequence[float],
    *,
    old: Sequence[TokenScores] | None,
    ref: Sequence[TokenScores] | None,
    kl_control: KlControl,
) -> ShapedStep:
    """Rewards, group advantages, weights; one training sequence per sampled one. ``kl_control`` moves on by one step.

    Raises:
        RewardError: a score is not finite.
    """
    old_logprobs = _old_logprobs(stages, sequences, old)
    rewards, penalty_metrics = _rewards(config, scores, old_logprobs, ref, kl_control)
    advantages = group_advantages(
        rewards,
        [sequence.group for sequence in sequences],
        norm_by_std=config.algorithm.norm_adv_by_std_in_grpo,
    )
    weights, weight_metrics = _weights(config, sequences, old)
    training = training_sequences(
        sequences,
        advantages,
        old_logprobs=old_logprobs,
        ref_logprobs=_ref_logprobs(config, ref),
        rollout_weights=weights,
    )
    return ShapedStep(
        rewards=tuple(rewards),
        advantages=tuple(advantages),
        training=tuple(training),
        metrics={"critic/score/near_misses": _near_misses(sequences), **penalty_metrics, **weight_metrics},
    )


def _near_misses(sequences: Sequence[SampledSequence]) -> float:
    """Responses that score 0 by their form alone: they explain a reward that stays flat."""
    prompts = [sequence.prompt for sequence in sequences]
    return float(
        count_near_misses(
            [prompt.data_source for prompt in prompts],
            [sequence.response_text for sequence in sequences],
            [prompt.ground_truth for prompt in prompts],
        )
    )


BITWISE = "mismatch/bitwise_equal_fraction"


def insist_on_exact(config: TrainConfig, agreement: dict[str, float], found: str = "") -> None:
    """Stop where ``trainfer.exact=true`` and some token's two log-probs differ by even one bit.

    Raises:
        EngineError: says how many, and what was ``found`` about it.
    """
    fraction = agreement.get(BITWISE, 1.0)
    if config.trainfer.exact == "true" and fraction < 1.0:
        raise EngineError(
            f"trainfer.exact=true, but {1 - fraction:.3%} of this step's tokens have other log-probs in the trainer than "
            f"in the rollout (largest difference {agreement['mismatch/logp_abs_diff_max']:.3g}). Use rollout.name=builtin "
            "with equal dtypes (rollout.dtype, actor.fsdp_config.dtype), or trainfer.exact=auto to go on and measure."
            + (f"\n{found}" if found else "")
        )


def _rewards(
    config: TrainConfig,
    scores: Sequence[float],
    old_logprobs: Sequence[tuple[float, ...]] | None,
    ref: Sequence[TokenScores] | None,
    kl_control: KlControl,
) -> tuple[Sequence[float], dict[str, float]]:
    """As verl's ``apply_kl_penalty``: a group advantage sums a sequence's token rewards, so it sums the penalty too.

    In bypass mode the old log-probs are the rollout's here as well.
    """
    if not config.algorithm.use_kl_in_reward:
        return scores, {}
    assert old_logprobs is not None, "stages() does not leave them to the update"
    assert ref is not None, "stages() asks for the pass"
    weight = kl_control.weight
    estimator = KlEstimator.of(config.algorithm.kl_penalty)
    kl = sequence_kl(old_logprobs, [s.logprobs for s in ref], estimator)
    means = [total / len(logprobs) for total, logprobs in zip(kl, old_logprobs, strict=True)]
    rewards = [score - weight * total for score, total in zip(scores, kl, strict=True)]
    mean = sum(means) / len(means)
    kl_control.update(mean, sequences=len(scores))
    return rewards, {
        "actor/reward_kl_penalty": mean,
        "actor/reward_kl_penalty_coeff": weight,
    }


def _weights(
    config: TrainConfig, sequences: Sequence[SampledSequence], old: Sequence[TokenScores] | None
) -> tuple[Sequence[tuple[float, ...]] | None, dict[str, float]]:
    """Of the sampled distribution on both sides: filters would otherwise look like a mismatch."""
    correction = config.algorithm.rollout_correction
    if correction.rollout_is is None:
        return None, {}
    assert old is not None, "stages() asks for the pass"
    weights = rollout_weights(
        [scored.sampled_logprobs for scored in old],
        [sequence.rollout_logprobs for sequence in sequences],
        level=ImportanceLevel(correction.rollout_is),
        bounds=WeightBounds.parse(correction.rollout_is_threshold),
        normalise=correction.rollout_is_batch_normalize,
    )
    return weights.weights, dict(weights.statistics)


def _ref_logprobs(config: TrainConfig, ref: Sequence[TokenScores] | None) -> list[tuple[float, ...]] | None:
    """The loss gets them only for a KL term of its own, not for one in the reward."""
    if not config.actor_rollout_ref.actor.use_kl_loss:
        return None
    assert ref is not None, "stages() asks for the pass"
    return [scored.logprobs for scored in ref]


def _old_logprobs(
    stages: Stages, sequences: Sequence[SampledSequence], old: Sequence[TokenScores] | None
) -> list[tuple[float, ...]] | None:
    match stages.old_logprobs:
        case OldLogProbs.PASS:
            assert old is not None
            return [scored.logprobs for scored in old]
        case OldLogProbs.ROLLOUT:
            return [sequence.rollout_logprobs for sequence in sequences]
        case OldLogProbs.UPDATE:
            return None
