"""The worked examples: what each verl release makes of eighteen inputs, every number worked by hand.

Symbols as in ``asking``: T prompts a step, n samples, G GPUs, M mini-batch (prompts), m micro-batch,
L log-prob batch (sequences a rank), TP, SP, E epochs.
"""

import pytest
from asking import codes, plan, upstream

from trainfer.plan.records import Span

NAMES = (
    "sequences_per_step", "data_parallel_size", "rollout_replicas", "sequences_per_replica", "sequences_per_rank",
    "mini_batch_sequences_per_rank", "mini_batches_per_epoch", "gradient_accumulation_steps",
    "log_prob_forwards_per_rank", "optimizer_steps_per_step", "padding_sequences",
)  # fmt: skip

PUBLIC = {"T": 60, "n": 12, "G": 6, "TP": 2, "M": 60, "m": 8, "L": 8}
VERL_GRPO = {"T": 1024, "n": 5, "G": 8, "TP": 2, "M": 256, "m": 80, "L": 160}
MSPROBE = {"T": 8, "n": 4, "G": 8, "TP": 2, "M": 8, "m": 4, "L": 4}
ULYSSES = {"T": 64, "n": 8, "G": 8, "SP": 2, "TP": 4, "M": 32, "m": 8, "L": 8, "packed": True}
LATE_MICRO = {"T": 64, "n": 5, "G": 8, "M": 32, "m": 8, "L": 8}
LOG_PROB_TAIL = {"T": 60, "n": 12, "G": 6, "M": 60, "m": 8, "L": 16}
FLOOR = {"T": 10, "n": 2, "G": 4, "M": 5, "m": 1, "L": 1}
TAIL = {"T": 60, "n": 12, "G": 6, "M": 40, "m": 8, "L": 8}
HIDDEN = {"T": 32, "n": 8, "G": 8, "M": 64, "dynamic": True}
LEGACY = {"T": 64, "n": 4, "G": 8, "M": 64, "m_all": 16, "L": 8}
WORKERS = {"T": 9, "n": 4, "G": 6, "M": 9, "m": 6, "L": 6, "mode": "async", "workers": 8}
EPOCHS = {"T": 128, "n": 8, "G": 8, "M": 32, "m": 4, "L": 8, "E": 2}
GENERATION = {"T": 64, "gen": 96, "n": 8, "G": 8, "M": 64, "m": 8, "L": 8}
HSDP = {**VERL_GRPO, "fsdp": 4}


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        (PUBLIC, (720, 6, 3, 240, 120, 120, 1, 15, 15, 1, 0)),
        (VERL_GRPO, (5120, 8, 4, 1280, 640, 160, 4, 2, 4, 4, 0)),
        (MSPROBE, (32, 8, 4, 8, 4, 4, 1, 1, 1, 1, 0)),
        (ULYSSES, (512, 4, 2, 256, 128, 64, 2, 8, 16, 2, 0)),
        (EPOCHS, (1024, 8, 4, 256, 128, 32, 4, 8, 16, 8, 0)),
        (HSDP, (5120, 8, 4, 1280, 640, 160, 4, 2, 4, 4, 0)),
    ],
    ids=["public", "verl-grpo", "msprobe", "ulysses", "epochs", "hsdp"],
)
def test_legal_inputs_give_the_same_numbers_in_both_releases(rules, sizes, numbers):
    planned = plan(rules, **sizes)
    assert planned.ok
    assert planned.problems == ()
    assert tuple(getattr(planned.derived, name) for name in NAMES) == numbers


def test_the_ratio_is_exactly_one_with_one_mini_batch_in_06_only():
    assert any("ratio as exactly 1" in note for note in plan("verl-0.6", **PUBLIC).notes)
    assert not any("exactly 1" in note for note in plan("verl-0.9", **PUBLIC).notes)


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
def test_the_total_is_tested_against_the_gpus(rules):
    planned = plan(rules, T=10, n=5, G=8, M=10, m=1, L=1)
    assert not planned.ok
    assert (
        upstream(planned)[0]
        == "real_train_batch_size (50) must be divisible by minimal possible batch size (8)"
    )
    assert planned.problems[0].when == "config"


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
def test_a_mini_batch_may_not_exceed_the_step(rules):
    planned = plan(rules, T=32, n=8, G=8, M=64, m=8, L=8)
    assert "train_batch_size (32) must be >= actor.ppo_mini_batch_size (64)" in upstream(planned)
    assert planned.problems[0].suggestions[0] == {"actor_rollout_ref.actor.ppo_mini_batch_size": 32}


def test_a_micro_batch_that_does_not_divide_is_found_at_init_in_06_and_after_the_rollout_in_09():
    old, new = plan("verl-0.6", **LATE_MICRO), plan("verl-0.9", **LATE_MICRO)
    assert upstream(old) == [
        "normalized ppo_mini_batch_size 20 should be divisible by ppo_micro_batch_size_per_gpu 8"
    ]
    assert upstream(new) == ["data size must be divisible by force_group_size * micro_batch_size_per_gpu"]
    assert (old.problems[0].when, new.problems[0].when) == ("init", "run")
    assert "1, 2, 4, 5, 10, 20" in old.problems[0].message
    assert (new.derived.mini_batch_sequences_per_rank, new.derived.sequences_per_rank) == (20, 40)


def test_a_ragged_log_prob_batch_is_harmless_in_06_and_fatal_in_09():
    old, new = plan("verl-0.6", **LOG_PROB_TAIL), plan("verl-0.9", **LOG_PROB_TAIL)
    assert old.ok
    assert old.derived.log_prob_forwards_per_rank == 8
    assert codes(new) == ["log_prob_batch_not_divisible"]
    assert new.problems[0].when == "run"
    assert new.derived.log_prob_forwards_per_rank is None


def test_06_rounds_a_mini_batch_down_in_silence_and_halves_a_gradient():
    old, new = plan("verl-0.6", **FLOOR), plan("verl-0.9", **FLOOR)
    numbers = old.derived
    assert (numbers.sequences_per_rank, numbers.mini_batch_sequences_per_rank) == (5, 2)
    assert (numbers.mini_batches_per_epoch, numbers.optimizer_steps_per_step) == (3, 3)
    assert codes(old) == ["mini_batch_rounded_down", "last_mini_batch_is_short"]
    assert {problem.when for problem in old.problems} == {"silent"}
    assert "2.5 sequences a rank" in old.problems[0].message
    assert "3 optimizer steps an epoch instead of 2" in old.problems[0].message
    assert "scaled by 0.5" in old.problems[1].message
    assert upstream(new) == ["Got mini_batch_size=10 and self.engine.get_data_parallel_size()=4"]


def test_a_ragged_last_mini_batch_is_half_a_gradient_in_06_and_padding_in_09():
    old, new = plan("verl-0.6", **TAIL), plan("verl-0.9", **TAIL)
    assert (old.derived.sequences_per_rank, old.derived.mini_batch_sequences_per_rank) == (120, 80)
    assert (old.derived.mini_batches_per_epoch, old.derived.gradient_accumulation_steps) == (2, 10)
    assert [(p.severity, p.when) for p in old.problems] == [("error", "silent")]
    assert "has 40, and its gradient is scaled by 0.5" in old.problems[0].message
    assert new.ok
    assert [(p.code, p.severity, p.when) for p in new.problems] == [
        ("synthetic_padding", "warning", "silent")
    ]
    numbers = new.derived
    assert (numbers.sequences_per_step, numbers.padding_sequences, numbers.sequences_per_rank) == (
        720,
        240,
        160,
    )
    assert (numbers.mini_batch_sequences_per_rank, numbers.mini_batches_per_epoch) == (80, 2)
    assert numbers.gradient_accumulation_steps == 10


def test_padding_dilutes_the_means_over_sequences_only():
    diluted = plan("verl-0.9", **TAIL, agg="seq-mean-token-mean")
    assert not diluted.ok
    assert "gradient is scaled by 0.75" in diluted.problems[0].message


def test_dynamic_batches_hide_a_mini_batch_larger_than_the_step():
    old, new = plan("verl-0.6", **HIDDEN), plan("verl-0.9", **HIDDEN)
    assert (old.derived.mini_batch_sequences_per_rank, old.derived.mini_batches_per_epoch) == (64, 1)
    assert "32 sequences a rank, fewer than one mini-batch of 64" in old.problems[0].message
    assert "scaled by 0.5" in old.problems[0].message
    assert not old.ok
    assert (new.derived.padding_sequences, new.derived.optimizer_steps_per_step) == (256, 1)
    assert new.ok


def test_the_global_micro_batch_is_divided_in_06_and_crashes_09():
    old, new = plan("verl-0.6", **LEGACY), plan("verl-0.9", **LEGACY)
    assert old.ok
    assert (old.derived.micro_batch_sequences_per_rank, old.derived.mini_batch_sequences_per_rank) == (2, 32)
    assert (old.derived.gradient_accumulation_steps, old.derived.optimizer_steps_per_step) == (16, 1)
    assert codes(old) == ["deprecated_global_micro_batch_size"]
    assert codes(new, severity="error") == ["global_micro_batch_size_not_supported"]
    assert new.problems[-1].when == "init"


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
def test_a_global_micro_batch_below_one_a_gpu_is_refused(rules):
    planned = plan(rules, **{**LEGACY, "m_all": 4})
    assert "ppo_micro_batch_size (4) * ulysses_sequence_parallel_size (1) must be >= n_gpus (8)" in upstream(
        planned
    )


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
def test_the_gpus_are_whole_rollout_engines(rules):
    planned = plan(rules, **{**PUBLIC, "TP": 4})
    assert upstream(planned) == ["rollout world_size: 6 is not divisible by infer_world_size: 4"]
    assert planned.problems[0].when == "init"
    assert planned.derived.rollout_replicas is None
    assert planned.problems[0].suggestions[0] == {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}


def test_async_workers_must_divide_in_06_and_may_be_ragged_in_09():
    old, new = plan("verl-0.6", **WORKERS), plan("verl-0.9", **WORKERS)
    assert upstream(old) == ["only support equal chunk. Got size of DataProto 36 and chunk 8."]
    assert old.problems[0].when == "run"
    assert new.ok
    assert (new.derived.sequences_per_rank, new.derived.gradient_accumulation_steps) == (6, 1)
    assert new.derived.optimizer_steps_per_step == 1


def test_the_learning_rate_steps_once_a_step():
    assert plan("verl-0.6", **EPOCHS).derived.learning_rate_steps_per_step == 1


def test_gen_batch_size_replaces_the_step_in_06_and_must_divide_it_in_09():
    old, new = plan("verl-0.6", **GENERATION), plan("verl-0.9", **GENERATION)
    assert (old.derived.prompts_per_step, old.derived.sequences_per_step) == (96, 768)
    assert codes(old) == ["last_mini_batch_is_short", "gen_batch_size_replaces_train_batch_size"]
    assert "has 32, and its gradient is scaled by 0.5" in old.problems[0].message
    assert upstream(new)[0].startswith("num_prompts (64) must be a positive multiple of gen_batch_size (96)")


def test_dynamic_micro_batches_are_a_span():
    # 160 full sequences of 2048: 110 by verl 0.6.1's estimate, 160 where a budget of 3000 is kept.
    sizes = {"T": 512, "n": 5, "G": 8, "M": 256, "Lp": 1024, "Lr": 1024, "dynamic": True, "tokens": 3000}
    assert plan("verl-0.6", **sizes).derived.gradient_accumulation_steps == Span(min=1, max=110)
    assert plan("verl-0.9", **sizes).derived.gradient_accumulation_steps == Span(min=1, max=160)
    assert codes(plan("verl-0.6", **sizes)) == ["token_budget_can_be_exceeded"]
