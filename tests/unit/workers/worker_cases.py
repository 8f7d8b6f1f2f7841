"""What several tests of the workers need: configurations and sequences."""

from trainfer.config.load import load_config
from trainfer.config.schema import TrainConfig
from trainfer.plan.records import StepPlan
from trainfer.plan.step import plan_step
from trainfer.types import FinishReason, Prompt, SampledSequence, SamplingParams

BASE = (
    "data.train_files=train.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
)


def config(*overrides: str) -> TrainConfig:
    return load_config(None, [*BASE, *overrides]).config


def planned(*overrides: str) -> tuple[TrainConfig, StepPlan]:
    made = config(*overrides)
    return made, plan_step(made)


def sampled(
    prompt_ids=(5, 6), response_ids=(7, 1), *, group=0, sample_index=0, rollout_logprobs=None, **sampling
) -> SampledSequence:
    return SampledSequence(
        prompt=Prompt(
            index=group,
            data_source="trainfer/letters",
            messages=(),
            token_ids=tuple(prompt_ids),
            ground_truth="x",
        ),
        sample_index=sample_index,
        group=group,
        seed=0,
        sampling=SamplingParams(max_new_tokens=8, **sampling),
        response_ids=tuple(response_ids),
        response_text="x",
        rollout_logprobs=rollout_logprobs or (-1.0,) * len(response_ids),
        finish_reason=FinishReason.LENGTH,
        weights_version=0,
    )
