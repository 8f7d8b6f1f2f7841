"""``plan_step``: trainfer's own numbers, and every problem at once."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.config.schema import TrainConfig
from trainfer.errors import PlanError
from trainfer.plan.step import plan_step


def config(*, train=60, mini=60, micro: int | None = 8, n=12, gpus=6, sp=1, epochs=1, rollout=None, **data):
    actor = {
        "ppo_mini_batch_size": mini,
        "ppo_micro_batch_size_per_gpu": micro,
        "ppo_epochs": epochs,
        "ulysses_sequence_parallel_size": sp,
    }
    tree = {
        "data": {"train_files": "train.parquet", "train_batch_size": train, **data},
        "actor_rollout_ref": {"actor": actor, "rollout": {"n": n, **(rollout or {})}},
        "trainer": {"n_gpus_per_node": gpus},
    }
    return msgspec.convert(tree, TrainConfig)


def test_the_public_example():
    plan = plan_step(config(rollout={"log_prob_micro_batch_size_per_gpu": 8}))
    assert (plan.sequences_per_step, plan.sequences_per_rank, plan.data_parallel_size) == (720, 120, 6)
    assert (plan.mini_batch_sequences, plan.mini_batch_sequences_per_rank, plan.mini_batches_per_epoch) == (
        720,
        120,
        1,
    )
    assert (plan.gradient_accumulation_steps, plan.optimizer_steps_per_step) == (15, 1)
    assert (plan.log_prob_micro_batch_sequences_per_rank, plan.log_prob_micro_batch_tokens_per_rank) == (
        8,
        None,
    )
    assert (
        plan.ref_log_prob_micro_batch_sequences_per_rank,
        plan.ref_log_prob_micro_batch_tokens_per_rank,
    ) == (
        None,
        16384,
    )


def test_a_micro_batch_that_does_not_divide_is_legal():
    # 128 x 5 over 5 ranks: 64 a rank and mini-batch; micro 10 makes 7 micro-batches, the last ones of 9.
    assert plan_step(config(train=128, mini=64, micro=10, n=5, gpus=5)).gradient_accumulation_steps == 7


def test_epochs_multiply_optimizer_steps():
    plan = plan_step(config(train=128, mini=32, micro=4, n=8, gpus=8, epochs=2))
    assert (plan.mini_batches_per_epoch, plan.optimizer_steps_per_step) == (4, 8)


def test_sequence_parallel_shares_sequences_and_adds_up_budgets():
    plan = plan_step(config(train=64, mini=32, micro=None, n=8, gpus=8, sp=2))
    assert (plan.data_parallel_size, plan.sequences_per_rank, plan.mini_batch_sequences_per_rank) == (
        4,
        128,
        64,
    )
    assert (plan.micro_batch_sequences_per_rank, plan.micro_batch_tokens_per_rank) == (None, 32768)
    assert plan.gradient_accumulation_steps is None


def test_all_problems_are_told_at_once_with_values_and_remedies():
    with pytest.raises(PlanError) as caught:
        plan_step(
            config(
                train=100,
                mini=64,
                micro=None,
                n=5,
                gpus=6,
                sp=4,
                max_prompt_length=32768,
                max_response_length=40000,
                rollout={"name": "vllm", "tensor_model_parallel_size": 4},
            )
        )
    message = str(caught.value)
    assert "train_batch_size=100 prompts a step are not whole mini-batches" in message
    assert "6 ranks are not whole sequence-parallel groups" in message
    assert "6 ranks are not whole rollout engines" in message
    assert "ppo_max_token_len_per_gpu=16384 (times sequence-parallel size 4)" in message
    assert "at least 18192" in message


def test_fewer_prompts_than_a_mini_batch_are_refused():
    with pytest.raises(PlanError, match=r"train_batch_size=16 .*ppo_mini_batch_size=128 .*count prompts"):
        plan_step(config(train=16, mini=128, n=4, gpus=4))


def test_uneven_ranks_are_refused():
    with pytest.raises(PlanError, match=r"10 prompts x 5 samples = 50 sequences .* 8 data-parallel ranks"):
        plan_step(config(train=10, mini=10, micro=1, n=5, gpus=8))


def test_tensor_parallel_needs_an_engine_that_has_it():
    with pytest.raises(PlanError, match="engine builtin keeps a whole model"):
        plan_step(config(rollout={"tensor_model_parallel_size": 2}))


@given(
    train=st.integers(1, 64),
    mini=st.integers(1, 64),
    micro=st.integers(1, 20),
    n=st.integers(1, 8),
    gpus=st.integers(1, 8),
    epochs=st.integers(1, 3),
)
@settings(deadline=None)
def test_a_plan_loses_no_sequence(train, mini, micro, n, gpus, epochs):
    try:
        plan = plan_step(config(train=train, mini=mini, micro=micro, n=n, gpus=gpus, epochs=epochs))
    except PlanError:
        assert train % mini or (mini * n) % gpus
        return
    assert plan.sequences_per_rank * plan.data_parallel_size == plan.sequences_per_step == train * n
    assert plan.mini_batch_sequences * plan.mini_batches_per_epoch == plan.sequences_per_step
    assert plan.mini_batch_sequences_per_rank * plan.data_parallel_size == plan.mini_batch_sequences
    assert plan.gradient_accumulation_steps is not None
    assert 0 <= plan.gradient_accumulation_steps * micro - plan.mini_batch_sequences_per_rank < micro
    assert plan.optimizer_steps_per_step == epochs * plan.mini_batches_per_epoch
