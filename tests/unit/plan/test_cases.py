"""Launch scripts and settings that people really had, planned: every number, every message."""

from pathlib import Path

import pytest
from asking import codes, question, upstream

from trainfer.plan.analyse import analyse
from trainfer.plan.read import read_question
from trainfer.plan.records import Span

CASES = Path(__file__).parent / "cases"
A = "actor_rollout_ref"


def planned(name, rules, *overrides, **variables):
    (path,) = CASES.glob(f"{name}-*.sh")
    return analyse(read_question(path, overrides, variables=variables), rules)


NAMES = (
    "num_gpus", "data_parallel_size", "sequences_per_step", "sequences_per_rank", "mini_batch_sequences_per_rank",
    "gradient_accumulation_steps", "optimizer_steps_per_step", "log_prob_forwards_per_rank", "rollout_replicas",
)  # fmt: skip


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("01", (2, 2, 80, 40, 40, 1, 1, 1, 2)),
        ("51", (8, 8, 5120, 640, 160, 2, 4, 4, 4)),
        ("53", (2, 2, 80, 40, 40, 1, 1, 1, 1)),
        ("56", (8, 2, 80, 40, 40, 40, 1, 40, 2)),
        ("58", (8, 2, 5120, 2560, 640, 160, 4, 640, 4)),
    ],
)
def test_scripts_with_fixed_micro_batches(rules, name, numbers):
    plan = planned(name, rules)
    assert plan.ok
    assert tuple(getattr(plan.derived, field) for field in NAMES) == numbers
    assert codes(plan) == (["megatron_only_counted"] if name == "58" else [])


def test_a_micro_batch_above_the_mini_batch_as_typed_is_legal():
    plan = planned("01", None)
    assert plan.rules == "verl-0.9"
    assert plan.problems == ()
    assert (plan.derived.prompts_per_step, plan.derived.sequences_per_step) == (16, 80)


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
def test_05_every_broken_rule_is_told_at_once_and_each_remedy_cures_all(rules):
    plan = planned("05", rules)
    assert (
        upstream(plan)[0]
        == "real_train_batch_size (640) must be divisible by minimal possible batch size (6)"
    )
    assert len([problem for problem in plan.problems if problem.severity == "error"]) >= 2
    remedies = [
        (s["data.train_batch_size"], s[f"{A}.actor.ppo_mini_batch_size"])
        for s in plan.problems[0].suggestions
    ]
    assert remedies[0] == (120, 60)
    assert (144, 72) in remedies
    assert not {(126, 63), (630, 63)} & set(remedies)
    cured = planned("05", rules, "data.train_batch_size=120", f"{A}.actor.ppo_mini_batch_size=60").derived
    assert (cured.sequences_per_rank, cured.mini_batch_sequences_per_rank) == (100, 50)
    assert (cured.gradient_accumulation_steps, cured.optimizer_steps_per_step) == (5, 2)
    other = planned("05", rules, "data.train_batch_size=144", f"{A}.actor.ppo_mini_batch_size=72").derived
    assert (other.sequences_per_rank, other.mini_batch_sequences_per_rank) == (120, 60)
    assert (other.gradient_accumulation_steps, other.optimizer_steps_per_step) == (6, 2)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("verl-0.6", "ppo_mini_batch_size 0 should be larger than 0 after normalization"),
        ("verl-0.9", "Got mini_batch_size=2 and self.engine.get_data_parallel_size()=4"),
    ],
)
def test_06_a_mini_batch_that_becomes_nothing(rules, message):
    plan = planned("06", rules)
    assert upstream(plan) == [message]
    assert "1 x 2 // 4 = 0" in plan.problems[0].message
    assert "smallest" in plan.problems[0].message
    assert plan.problems[0].suggestions[0] == {f"{A}.actor.ppo_mini_batch_size": 2}
    cured = planned("06", rules, f"{A}.actor.ppo_mini_batch_size=2").derived
    assert (cured.mini_batch_sequences_per_rank, cured.optimizer_steps_per_step) == (1, 2)


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
def test_07_the_step_is_smaller_than_the_mini_batch(rules):
    plan = planned("07", rules)
    assert upstream(plan) == ["train_batch_size (16) must be >= actor.ppo_mini_batch_size (128)"]
    assert "counts prompts, not sequences" in plan.problems[0].message
    assert plan.problems[0].suggestions[0] == {f"{A}.actor.ppo_mini_batch_size": 16}
    for mini, steps in ((16, 1), (8, 2), (4, 4)):
        cured = planned("07", rules, f"{A}.actor.ppo_mini_batch_size={mini}")
        assert cured.ok
        assert cured.derived.optimizer_steps_per_step == steps


@pytest.mark.parametrize(
    ("rules", "message", "when"),
    [
        (
            "verl-0.6",
            "normalized ppo_mini_batch_size 6 should be divisible by ppo_micro_batch_size_per_gpu 4",
            "init",
        ),
        ("verl-0.9", "data size must be divisible by force_group_size * micro_batch_size_per_gpu", "run"),
    ],
)
def test_09_the_allowed_micro_batches_are_named(rules, message, when):
    plan = planned("09", rules)
    assert upstream(plan) == [message]
    assert plan.problems[0].when == when
    assert "1, 2, 3, 6" in plan.problems[0].message


COMMON = {
    "data.train_batch_size": 8, f"{A}.actor.ppo_mini_batch_size": 8, f"{A}.actor.ppo_micro_batch_size_per_gpu": 2,
    f"{A}.actor.use_kl_loss": True, f"{A}.rollout.n": 2, "trainer.n_gpus_per_node": 2,
}  # fmt: skip
LP, REF = f"{A}.rollout.log_prob_micro_batch_size", f"{A}.ref.log_prob_micro_batch_size"
VARIANTS = {
    "missing": {f"{REF}_per_gpu": 2},
    "both_on_ref": {f"{LP}_per_gpu": 2, REF: 4, f"{REF}_per_gpu": 2},
    "zero": {f"{LP}_per_gpu": 0, f"{REF}_per_gpu": 2},
    "not_a_divisor": {f"{LP}_per_gpu": 3, f"{REF}_per_gpu": 3},
    "old_global_key": {LP: 4, REF: 4},
    "both_on_actor": {f"{A}.actor.ppo_micro_batch_size": 4, f"{LP}_per_gpu": 2, f"{REF}_per_gpu": 2},
}


def variant(name, rules, tmp_path):
    """The variant as a YAML file with dotted keys."""
    lines = [f"{key}: {str(value).lower()}" for key, value in {**COMMON, **VARIANTS[name]}.items()]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(lines) + "\n")
    return analyse(read_question(path, (), variables={}), rules)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", f"[{A}.rollout] Please set at least one of '{LP}' or '{LP}_per_gpu'."),
        ("both_on_ref", f"[{A}.ref] You have set both '{REF}' AND '{REF}_per_gpu'."),
        ("zero", "range() arg 3 must not be zero"),
        ("both_on_actor", "[actor] You have set both 'actor.ppo_micro_batch_size' AND"),
    ],
)
def test_11_log_prob_sizes_that_stop(name, message, tmp_path):
    for rules in ("verl-0.6", "verl-0.9"):
        plan = variant(name, rules, tmp_path)
        assert not plan.ok
        assert any(text.startswith(message) for text in upstream(plan))


def test_11_an_uneven_last_pass_is_harmless_in_06_and_refused_with_the_divisors_in_09(tmp_path):
    old, new = variant("not_a_divisor", "verl-0.6", tmp_path), variant("not_a_divisor", "verl-0.9", tmp_path)
    assert old.ok
    assert old.derived.log_prob_forwards_per_rank == 3
    assert not new.ok
    assert all("1, 2, 4, 8" in p.message for p in new.problems if p.severity == "error")


def test_11_the_old_global_key_works_in_06_with_a_note(tmp_path):
    plan = variant("old_global_key", "verl-0.6", tmp_path)
    assert plan.ok
    assert plan.derived.log_prob_forwards_per_rank == 4
    assert "deprecated_global_micro_batch_size" in codes(plan)


def test_14_generation_workers_matter_in_06_async_alone():
    assert planned("14", "verl-0.6").ok
    assert planned("14", "verl-0.9").ok
    plan = planned("14", "verl-0.6", f"{A}.rollout.mode=async")
    assert upstream(plan) == ["only support equal chunk. Got size of DataProto 60 and chunk 8."]
    message = plan.problems[0].message
    assert f"{A}.rollout.agent.num_workers=8 (the default)" in message
    assert "1, 2, 3, 4, 5, 6, 10, 12" in message
    assert all(set(s) == {f"{A}.rollout.agent.num_workers"} for s in plan.problems[0].suggestions)


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
def test_16_the_default_engine_size_is_named(rules):
    plan = planned("16", rules)
    assert upstream(plan) == ["rollout world_size: 1 is not divisible by infer_world_size: 2"]
    assert f"{A}.rollout.tensor_model_parallel_size=2 (the default)" in plan.problems[0].message
    assert plan.problems[0].suggestions == ({f"{A}.rollout.tensor_model_parallel_size": 1},)


@pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])
def test_52_dynamic_batches_leave_a_span(rules):
    plan = planned("52", rules)
    numbers = plan.derived
    assert plan.problems == ()
    assert (numbers.data_parallel_size, numbers.sequences_per_step, numbers.sequences_per_rank) == (
        8,
        5120,
        640,
    )
    assert (numbers.mini_batch_sequences_per_rank, numbers.optimizer_steps_per_step) == (160, 4)
    assert numbers.gradient_accumulation_steps == Span(min=1, max=11)
    assert numbers.rollout_replicas == 4


def test_61_arrays_and_defaults_are_read_and_the_ignored_size_is_said():
    plan = planned("61", "verl-0.9")
    numbers = plan.derived
    assert plan.ok
    assert (numbers.sequences_per_step, numbers.sequences_per_rank) == (2560, 320)
    assert (numbers.mini_batch_sequences_per_rank, numbers.optimizer_steps_per_step) == (160, 2)
    assert numbers.gradient_accumulation_steps == Span(min=1, max=160)
    assert numbers.rollout_replicas == 4
    assert codes(plan) == ["micro_batch_size_ignored"]
    assert plan.values["data.train_batch_size"].source.endswith("61-script-4b-env-arrays.sh:9")


def test_61_the_environment_gives_values():
    plan = planned("61", "verl-0.9", TRAIN_BATCH_SIZE="768", ROLLOUT_N="4")
    assert plan.derived.sequences_per_step == 3072


def test_61_two_full_sequences_do_not_fit_the_budget_which_06_overruns_in_silence():
    plan = planned("61", "verl-0.6")
    assert plan.derived.gradient_accumulation_steps == Span(min=1, max=110)
    (problem,) = [p for p in plan.problems if p.code == "token_budget_can_be_exceeded"]
    assert (problem.severity, problem.when) == ("warning", "silent")
    assert "4096 tokens, above 3000" in problem.message
    assert "takes 160" in problem.message


def test_a_script_hands_overrides_on():
    plan = planned("51", "verl-0.9", "data.train_batch_size=2048")
    assert plan.derived.prompts_per_step == 2048
    row = plan.values["data.train_batch_size"]
    assert row.source == "override"
    assert row.beaten[0].startswith("1024 (")


def test_the_question_of_the_thread_is_answered():
    # 256 prompts x 5 over 8 GPUs are 160 a rank, and 160 / 80 = 2.
    plan = analyse(
        question(
            [
                "algorithm.adv_estimator=grpo", "data.train_batch_size=256", f"{A}.actor.ppo_mini_batch_size=256",
                f"{A}.actor.ppo_micro_batch_size_per_gpu=80", f"{A}.rollout.n=5", f"{LP}_per_gpu=80",
            ]
        ),
        "verl-0.6",
    )  # fmt: skip
    assert plan.derived.mini_batch_sequences_per_rank == 160
    assert plan.derived.gradient_accumulation_steps == 2
