"""Rules that the worked examples do not reach: heads, hybrid sharding, budgets, kinds of values, choice of rules."""

import io
import json
import time

import pytest
from asking import codes, overrides_of, plan, question, upstream
from rich.console import Console

from trainfer.errors import ConfigError
from trainfer.plan.analyse import analyse
from trainfer.plan.explain import PARAGRAPHS, explain
from trainfer.plan.question import ModelShape
from trainfer.plan.read import read_question
from trainfer.plan.records import Span
from trainfer.plan.show import show
from trainfer.plan.to_json import plan_document

OK = {"T": 64, "n": 8, "G": 8, "TP": 2, "M": 32, "m": 8, "L": 8}
BOTH = pytest.mark.parametrize("rules", ["verl-0.6", "verl-0.9"])


def with_model(rules, shape, **sizes):
    return analyse(question(overrides_of(**sizes), model=shape), rules)


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads", "size", "ok"), [(14, 2, 2, True), (14, 2, 4, False), (16, 3, 2, False), (16, 2, 8, True)])  # fmt: skip
def test_heads_split_over_sequence_parallel_ranks(rules, heads, kv_heads, size, ok):
    shape = ModelShape(heads=heads, key_value_heads=kv_heads)
    result = with_model(rules, shape, T=64, n=8, G=8, SP=size, TP=1, M=32, m=8, L=8, packed=True)
    assert result.ok is ok
    if not ok:
        assert result.problems[0].when == "init"
        assert "must be divisible by ulysses_sp_size" in (result.problems[0].upstream_message or "")


@BOTH
def test_sequence_parallel_needs_packing(rules):
    result = plan(rules, **{**OK, "SP": 2, "packed": False})
    assert upstream(result) == [
        "When using sequence parallelism for actor/ref policy, you must enable `use_remove_padding`."
    ]


@BOTH
@pytest.mark.parametrize(
    ("size", "ok"), [(-1, True), (4, True), (8, True), (16, True), (3, False), (0, False)]
)
def test_fsdp_size_makes_whole_groups_and_changes_no_batch(rules, size, ok):
    result = plan(rules, **OK, fsdp=size)
    assert result.ok is ok
    assert result.derived.data_parallel_size == 8


@BOTH
def test_a_budget_counts_all_gpus_of_a_sequence_group(rules):
    sizes = {"T": 64, "n": 8, "G": 8, "M": 32, "packed": True, "dynamic": True, "Lp": 1024, "Lr": 1024}
    assert plan(rules, **sizes, SP=2, tokens=1024).ok
    short = plan(rules, **sizes, SP=1, tokens=1024)
    assert upstream(short)[0] == (
        "max_token_len must be greater than the sequence length. Got max_token_len=1024 and max_seq_len=2048"
    )
    assert len([code for code in codes(short) if code == "token_budget_smaller_than_sequence"]) == 2


def test_09_wants_both_passes_dynamic_or_none():
    sizes = {"T": 64, "n": 8, "G": 8, "M": 32, "L": 8, "dynamic": True, "L_dynamic": False}
    assert "dynamic_batches_disagree" in codes(plan("verl-0.9", **sizes))
    assert "dynamic_batches_disagree" not in codes(plan("verl-0.6", **sizes))


def test_the_v0_trainer_of_09_does_not_pad():
    result = plan("verl-0.9", T=60, n=12, G=6, TP=2, M=40, m=8, L=8, v1=False)
    assert upstream(result) == ["120 % 80 != 0"]
    assert result.derived.padding_sequences == 0


def test_separate_async_splits_a_step_into_updates():
    sizes = {"T": 256, "n": 8, "G": 8, "TP": 2, "M": 32, "m": 8, "L": 8, "trainer_mode": "separate_async"}
    numbers = plan("verl-0.9", **sizes).derived
    assert (numbers.optimizer_steps_per_step, numbers.learning_rate_steps_per_step) == (8, 4)
    assert numbers.sequences_per_rank == 256
    bad = plan("verl-0.9", **{**sizes, "T": 254})
    assert "train_batch_size (254) must be divisible by parameter_sync_step (4)" in upstream(bad)


def test_balance_cannot_be_turned_off_in_09_and_the_checklist_says_so():
    new, old = plan("verl-0.9", **OK, balance=False), plan("verl-0.6", **OK, balance=False)
    assert codes(new) == ["balance_batch_ignored"]
    assert codes(old) == []
    by_name = {condition.name: condition for condition in new.alignment.conditions}
    assert not by_name["balance_batch"].ok
    assert "cannot be met" in by_name["balance_batch"].remark


def test_the_aligned_example_is_ready_in_06_with_its_environment():
    texts = overrides_of(T=8, n=4, G=8, TP=2, M=8, m=4, L=4, packed=True, balance=False)
    ready = analyse(question(texts, environment={"TORCHDYNAMO_DISABLE": "1"}), "verl-0.6").alignment
    assert ready.ready
    assert [(c.name, c.value) for c in ready.conditions][:2] == [
        ("mini_batch_num", 1),
        ("gradient_accumulation", 1),
    ]
    assert not analyse(question(texts), "verl-0.6").alignment.ready
    assert not analyse(question(texts, environment={"TORCHDYNAMO_DISABLE": "1"}), "verl-0.9").alignment.ready


def test_the_environment_may_come_through_ray():
    texts = [*overrides_of(**OK), "+ray_kwargs.ray_init.runtime_env.env_vars.TORCHDYNAMO_DISABLE=1"]
    by_name = {c.name: c for c in analyse(question(texts), "verl-0.6").alignment.conditions}
    assert by_name["TORCHDYNAMO_DISABLE"].ok


@BOTH
@pytest.mark.parametrize("value", ["0", "-4", "1.5", "many", "[1,2]", "true"])
def test_a_value_of_the_wrong_kind_is_told(rules, value):
    result = analyse(question([*overrides_of(**OK), f"actor_rollout_ref.rollout.n={value}"]), rules)
    assert not result.ok
    assert result.problems[0].keys == ("actor_rollout_ref.rollout.n",)
    assert result.derived.sequences_per_step is None
    assert result.derived.num_gpus == 8


@BOTH
def test_an_unknown_key_names_the_nearest(rules):
    result = analyse(question([*overrides_of(**OK), "actor_rollout_ref.rollout.temperatur=1.0"]), rules)
    assert codes(result) == ["unknown_key"]
    assert "Did you mean actor_rollout_ref.rollout.temperature?" in result.problems[0].message
    assert upstream(result)[0].startswith("Could not override 'actor_rollout_ref.rollout.temperatur'.")


@BOTH
def test_plus_adds_a_key_and_may_not_add_an_existing_one(rules):
    assert analyse(question([*overrides_of(**OK), "+my.key=3"]), rules).ok
    again = analyse(question([*overrides_of(**OK), "+actor_rollout_ref.rollout.temperature=0.5"]), rules)
    assert codes(again) == ["key_exists_already"]


def test_the_rules_follow_the_keys():
    assert analyse(question(overrides_of(**OK))).rules == "verl-0.9"
    assert (
        analyse(question([*overrides_of(**OK), "reward_model.launch_reward_fn_async=true"])).rules
        == "verl-0.6"
    )
    assert analyse(question([*overrides_of(**OK), "actor_rollout_ref.rollout.mode=sync"])).rules == "verl-0.6"
    assert analyse(question([*overrides_of(**OK), "trainer.v1.trainer_mode=sync"])).rules == "verl-0.9"
    assert analyse(question(["trainfer.seed=3"])).rules == "trainfer"


def test_a_critic_that_nobody_asked_for_is_a_warning():
    texts = [text for text in overrides_of(**OK) if "adv_estimator" not in text]
    result = analyse(question(texts), "verl-0.6")
    assert result.ok
    assert codes(result) == ["critic_micro_batch_size_missing"]
    assert not analyse(question([*texts, "algorithm.adv_estimator=gae"]), "verl-0.6").ok


def test_megatron_is_counted_by_its_own_data_parallel_size_and_said():
    texts = [
        *overrides_of(T=1024, n=5, G=8, TP=2, M=256, m=4, L=4, strategy="megatron"),
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3",
    ]
    result = analyse(question(texts), "verl-0.6")
    assert (
        upstream(result)[0]
        == "n_gpus (8) must be divisible by model_parallel_size (6) times context_parallel_size (1)"
    )
    assert "megatron_only_counted" in codes(result)


def test_a_model_folder_gives_heads_and_memory(tmp_path):
    (tmp_path / "model").mkdir()
    config = {
        "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896, "num_hidden_layers": 24,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    run = tmp_path / "run.yaml"
    run.write_text("actor_rollout_ref: {model: {path: model}, actor: {ulysses_sequence_parallel_size: 4}}\n")
    result = analyse(read_question(run, overrides_of(**OK), variables={}), "verl-0.9")
    assert "attention_heads_not_divisible_by_sequence_parallel" in codes(result)
    assert result.memory is not None
    # embedding 136,134,656 + 24 layers of 14,910,976 (less the biases that Qwen2 has) + the last norm 896
    assert (
        result.memory.parameters
        == 151936 * 896 + 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864 + 2 * 896) + 896
    )
    assert result.memory.parts[0].gib == pytest.approx(4 * result.memory.parameters / 8 / 2**30, abs=1e-3)


def test_the_shapes_have_the_names_of_the_release():
    sizes = {"T": 60, "n": 12, "G": 6, "TP": 2, "M": 60, "m": 8, "L": 8, "Lp": 8192, "Lr": 1024}
    shapes = [str(tensor) for tensor in plan("verl-0.6", **sizes).tensors]
    assert "input_ids [60, 8192]" in shapes
    assert "prompts [720, 8192]" in shapes
    assert "responses [720, 1024]" in shapes
    assert "input_ids [8, 9216]" in shapes
    assert "input_ids [1, ≤ 73728]" in [str(t) for t in plan("verl-0.9", **sizes).tensors]


def test_explain_knows_every_key_by_its_end():
    for key, text in PARAGRAPHS.items():
        assert text in explain(key)
    assert "counts prompts" in explain("ppo_mini_batch_size") or "Prompts of one" in explain(
        "ppo_mini_batch_size"
    )
    with pytest.raises(ConfigError, match="Did you mean"):
        explain("ppo_minibatch_size")


def test_validation_is_padded_to_the_generators_of_06():
    assert plan("verl-0.6", **OK).derived.validation_padded_to_multiple_of == 4
    assert plan("verl-0.6", **OK, mode="async", workers=16).derived.validation_padded_to_multiple_of == 16
    assert plan("verl-0.9", **OK).derived.validation_padded_to_multiple_of == 1


@BOTH
@pytest.mark.parametrize("huge", ["1000000000000", "999999999999999989", "9" * 400, "9" * 6000])
@pytest.mark.parametrize(
    "key", ["data.train_batch_size", "trainer.nnodes", "actor_rollout_ref.actor.ppo_mini_batch_size"]
)
def test_huge_numbers_are_answered_soon(rules, huge, key):
    began = time.process_time()
    try:
        result = analyse(question([*overrides_of(**OK), f"{key}={huge}"]), rules)
    except ConfigError:
        return
    json.dumps(plan_document(result), allow_nan=False, default=str)
    show(result, title="huge", console=Console(file=io.StringIO(), width=120))
    assert time.process_time() - began < 1.0


def test_trainfer_checks_shard_groups_and_heads_in_its_own_words():
    sizes = {"T": 64, "n": 8, "G": 8, "M": 32, "m": 8}
    result = plan("trainfer", **sizes, fsdp=3)
    assert codes(result) == ["gpus_not_divisible_by_fsdp_size"]
    assert result.problems[0].upstream_message is None
    heads = analyse(
        question(overrides_of(**sizes, SP=4), model=ModelShape(heads=14, key_value_heads=2)), "trainfer"
    )
    assert codes(heads) == ["attention_heads_not_divisible_by_sequence_parallel"]


def test_trainfers_tensors_and_checklist_are_those_of_the_passes_that_it_makes():
    sizes = {"T": 8, "n": 5, "G": 4, "SP": 2, "M": 8, "Lp": 512, "Lr": 1024, "L": 3}
    one = plan(
        "trainfer", **sizes, tokens=2001
    )  # nothing but the update: its forward gives the old log-probs
    stages = {tensor.stage: str(tensor) for tensor in one.tensors}
    assert (
        stages
        == {
            "after generation": "token_ids [40, ≤ 1536]",
            "update, one micro-batch": "input_ids [1, ≤ 4016]",  # 4002 tokens, a multiple of 8 rows on each of 2 GPUs
            "update, one micro-batch, one GPU of 2": "input_ids [1, ≤ 2008]",
        }
    )
    by_name = {condition.name: condition for condition in one.alignment.conditions}
    assert (by_name["use_dynamic_bsz"].value, by_name["use_dynamic_bsz"].ok) == (True, False)
    two = plan("trainfer", **{**sizes, "M": 4}, m=4, Lref=100, kl=True)
    stages = {tensor.stage: str(tensor) for tensor in two.tensors}
    assert stages["old log-probs, one micro-batch"] == "input_ids [1, ≤ 4608]"  # 20 a rank: 6 x 3 and 2
    assert stages["reference log-probs, one micro-batch"] == "input_ids [1, ≤ 30720]"  # all 20 in one
    assert stages["update, one micro-batch"] == "input_ids [1, ≤ 6144]"
    by_name = {condition.name: condition for condition in two.alignment.conditions}
    assert (by_name["use_dynamic_bsz"].value, by_name["gradient_accumulation"].value) == (False, 3)
    assert two.derived.micro_batch_sequences_per_rank == Span(min=3, max=4)  # 10 sequences: 4, 3 and 3


@pytest.mark.parametrize(
    ("engine", "gpus", "ok"), [("vllm", 1, True), ("vllm", 2, False), ("builtin", 2, False)]
)
def test_trainfers_ranks_host_an_engine_each_and_only_a_single_one_a_vllm_of_several_gpus(engine, gpus, ok):
    result = plan("trainfer", T=4, n=2, G=gpus, M=4, m=2, TP=2, name=engine)
    assert codes(result) == ([] if ok else ["engine_without_tensor_parallel"])
    assert ok or result.problems[0].suggestions[0] == {
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1
    }
    assert not ok or result.derived.rollout_replicas == 1
