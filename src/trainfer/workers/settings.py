"""The configuration and the plan as the records that workers take. Plain numbers, no model.

Takes ``TrainConfig`` and ``StepPlan``; gives settings of the update, limits of forwards and sampling
parameters, and which passes a step makes. Combinations that cannot be honoured have been refused before (``checks.py``).
"""

import enum
from dataclasses import dataclass
from pathlib import Path

import torch

from trainfer.config.schema import OptimConfig, TrainConfig
from trainfer.engines.vllm.settings import VllmSettings
from trainfer.plan.records import StepPlan
from trainfer.train.update.aggregate import LossAggregation
from trainfer.train.update.kl import KlEstimator
from trainfer.train.update.kl_control import KlControl, KlTarget
from trainfer.train.update.logprob import ForwardLimit
from trainfer.train.update.loss import LossSettings
from trainfer.train.update.schedule import LearningRate
from trainfer.train.update.trainer import TrainerSettings
from trainfer.types import SamplingParams


def trainer_settings(config: TrainConfig, plan: StepPlan, *, total_steps: int) -> TrainerSettings:
    """Constants of the update; ``total_steps`` is the length of the run, which the cosine spans."""
    actor = config.actor_rollout_ref.actor
    assert actor.clip_ratio_low is not None, "the schema fills it in"
    assert actor.clip_ratio_high is not None, "the schema fills it in"
    return TrainerSettings(
        loss=LossSettings(
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            entropy_coeff=actor.entropy_coeff,
            kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
            kl_estimator=KlEstimator.of(actor.kl_loss_type.removesuffix("+")),
            kl_straight_through=actor.kl_loss_type.endswith("+"),
        ),
        aggregation=LossAggregation(actor.loss_agg_mode),
        horizon=actor.loss_scale_factor or config.data.max_response_length,
        limit=ForwardLimit(
            sequences=plan.micro_batch_sequences_per_rank, tokens=plan.micro_batch_tokens_per_rank
        ),
        learning_rate=learning_rate(actor.optim, total_steps=total_steps),
        betas=actor.optim.betas,
        weight_decay=actor.optim.weight_decay,
        grad_clip=actor.grad_clip,
    )


def learning_rate(optim: OptimConfig, *, total_steps: int) -> LearningRate:
    """The schedule; -1 in the configuration stands for the run's own length, or for the warm-up's share of it."""
    span = optim.total_training_steps if optim.total_training_steps > 0 else total_steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * span)
    return LearningRate(
        peak=optim.lr,
        warmup_updates=warmup,
        cosine=optim.lr_scheduler_type == "cosine",
        total_updates=span,
        min_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
    )


def old_log_prob_limit(plan: StepPlan) -> ForwardLimit:
    """Of one forward of the old-log-prob pass."""
    return ForwardLimit(
        sequences=plan.log_prob_micro_batch_sequences_per_rank,
        tokens=plan.log_prob_micro_batch_tokens_per_rank,
    )


def ref_log_prob_limit(plan: StepPlan) -> ForwardLimit:
    """Of one forward of the ref pass."""
    return ForwardLimit(
        sequences=plan.ref_log_prob_micro_batch_sequences_per_rank,
        tokens=plan.ref_log_prob_micro_batch_tokens_per_rank,
    )


def vllm_settings(
    config: TrainConfig, model_folder: Path, *, device: str, dtype: torch.dtype
) -> VllmSettings:
    """How one rank's vLLM is started."""
    rollout = config.actor_rollout_ref.rollout
    return VllmSettings(
        model_folder=model_folder,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        max_sequence_tokens=config.data.max_prompt_length + config.data.max_response_length,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enable_prefix_caching=rollout.enable_prefix_caching,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
    )


def kl_control_of(config: TrainConfig) -> KlControl:
    """The weight of the KL penalty in the reward, and whether it moves."""
    control = config.algorithm.kl_ctrl
    moves = config.algorithm.use_kl_in_reward and control.type == "adaptive"
    target = KlTarget(kl=control.target_kl, horizon=control.horizon) if moves else None
    return KlControl(control.kl_coef, target)


def training_sampling(config: TrainConfig, *, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """What training sequences are drawn from."""
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop_token_ids=stop_token_ids,
    )


def validation_sampling(config: TrainConfig, *, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """What validation sequences are drawn from: greedy unless ``do_sample``."""
    validation = config.actor_rollout_ref.rollout.val_kwargs
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=validation.temperature if validation.do_sample else 0.0,
        top_k=validation.top_k if validation.do_sample else -1,
        top_p=validation.top_p if validation.do_sample else 1.0,
        stop_token_ids=stop_token_ids,
    )


class OldLogProbs(enum.Enum):
    """Where the old policy's log-probs come from."""

    PASS = "pass"
    """A forward pass of its own over all sequences."""
    UPDATE = "update"
    """The update's own forward. With one optimizer step per step that forward is made by the very policy that
    the pass would have asked, so the ratio is exactly 1 and a forward is saved (verl 0.6.1's shortcut)."""
    ROLLOUT = "rollout"
    """The engine (``algorithm.rollout_correction.bypass_mode``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Which optional passes a step makes."""

    old_logprobs: OldLogProbs
    ref: bool


def stages(config: TrainConfig, plan: StepPlan) -> Stages:
    """Decide from the configuration alone.

    The shortcut is not taken where something needs the old log-probs before the update (importance weights, KL
    in the reward), nor with sampling filters: the agreement check then needs filtered log-probs, which the
    loss does not compute.
    """
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    filters = rollout.top_k != -1 or rollout.top_p != 1.0 or rollout.min_p != 0.0
    if algorithm.rollout_correction.bypass_mode:
        old = OldLogProbs.ROLLOUT
    elif (
        plan.optimizer_steps_per_step == 1
        and algorithm.rollout_correction.rollout_is is None
        and not algorithm.use_kl_in_reward
        and not filters
    ):
        old = OldLogProbs.UPDATE
    else:
        old = OldLogProbs.PASS
    return Stages(
        old_logprobs=old, ref=config.actor_rollout_ref.actor.use_kl_loss or algorithm.use_kl_in_reward
    )
