"""Whole stock runs of verl 0.9.1 under ``trainfer attach``: agreement where there is none to find, causes where there is one.

About three minutes a run on free cores; ``make test-verl`` runs them.
"""

import json

import pytest
from verl091_runs import V0, WITH_REF, python, run

from trainfer.check.dump.reader import Dump
from trainfer.integrations.attached import sync_proofs

pytestmark = [pytest.mark.verl, pytest.mark.timeout(3000)]
SEQUENCES = 8
"""Four prompts, two samples each."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by name; each happens once."""
    if not python().exists():
        pytest.skip(f"{python()} is not there: make setup-verl")
    folder, done = tmp_path_factory.mktemp("verl091"), {}

    def start(name, **arguments):
        if name not in done:
            done[name] = run(folder, name, **arguments)
        return done[name]

    return start


@pytest.fixture(scope="module")
def v1(runs):
    return runs("v1", overrides=WITH_REF)


@pytest.fixture(scope="module")
def v0(runs):
    return runs("v0", overrides=V0)


def _agrees(ended, step, pass_name):
    result = ended.result(step, pass_name)
    stages = {stage["name"]: stage["status"] for stage in result["stages"]}
    assert result["verdict"] in ("equal", "rounding"), result["stages"]
    assert stages["tokens"] == "equal"
    assert stages["weights"] == "equal"
    coverage = result["coverage"]
    lengths = [len(sequence.tokens) for sequence in _sequences(ended, step)]
    assert coverage["rows_train"] == sum(lengths)
    assert (
        coverage["rows_matched"] == coverage["rows_rollout"] == sum(lengths) - SEQUENCES
    )  # nobody runs the last token
    assert coverage["modules_matched"] > 20
    assert result["logprobs"]["count"] == _responses(ended, step)
    assert result["logprobs"]["abs_diff_max"] < 1e-4
    assert [cause for cause in ended.causes(step, pass_name) if not cause.startswith("shape.")] == []


def _sequences(ended, step):
    dump = Dump(ended.out / f"step_{step}" / "rollout" / "requests-0")
    return list(dump.sequences(0))


def _responses(ended, step):
    return sum(len(sequence.tokens) - sequence.prompt_length for sequence in _sequences(ended, step))


def test_a_stock_run_ends_well_and_all_its_rows_agree(v1):
    assert v1.code == 0, v1.printed[-4000:]
    for step in (0, 1):
        assert len(_sequences(v1, step)) == SEQUENCES
        for pass_name in ("old_log_prob", "update"):
            _agrees(v1, step, pass_name)


def test_both_sides_of_the_row_join_saw_prefill_and_decode(v1):
    rollout = Dump(v1.out / "step_0" / "rollout" / "engine-0")
    assert {call.pass_name for call in rollout.calls(0).values()} >= {"prefill", "decode"}
    assert rollout.complete


def test_every_sync_is_proven_and_the_weights_moved(v1):
    proofs = list(sync_proofs(v1.out))
    assert [proof.version for proof in proofs] == [0, 1, 2]
    assert all(proof.holds for proof in proofs)
    fingerprints = {}
    for record in Dump(v1.out / "weights" / "train").weights(0):
        fingerprints.setdefault(record.name, set()).add(record.fingerprint)
    assert all(len(found) == 3 for found in fingerprints.values())


def test_the_reference_pass_is_captured_and_judged_by_nobody(v1):
    for step in (0, 1):
        assert Dump(v1.out / f"step_{step}" / "ref_log_prob").complete
        assert not (v1.out / f"step_{step}" / "report-ref_log_prob").exists()
    assert "ref_log_prob" not in v1.printed.split("the command ended")[-1].replace("ref_log_prob_", "")


def test_samples_keep_verls_names(v1):
    for sequence in Dump(v1.out / "step_0" / "old_log_prob").sequences(0):
        uid, _, session = (sequence.request_id or "").partition("/")
        assert uid
        assert session in ("0", "1")


def test_it_said_before_the_start_what_it_hooks_and_what_it_may_write(v1):
    before = v1.printed.split("ray init kwargs")[0]
    assert "verl 0.9.1, vLLM 0.30.0" in before
    assert "FSDPEngineWithLMHead.forward_step" in before
    assert "disk: at most" in before


def test_the_older_trainer_agrees_too(v0):
    assert v0.code == 0, v0.printed[-4000:]
    for step in (0, 1):
        for pass_name in ("old_log_prob", "update"):
            _agrees(v0, step, pass_name)


RECIPE = (
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)


def test_the_prompts_only_recipe_trims_the_update_and_learns_nothing(runs):
    ended = runs("prompts", options=("--prompts-only", "--steps", "0"), overrides=RECIPE)
    assert ended.code == 0, ended.printed[-4000:]
    assert "optimizer step is SKIPPED" in ended.printed
    update = Dump(ended.out / "update_actor" / "step_0")
    prompts = {record.tokens[: record.prompt_length] for record in update.sequences(0)}
    assert all(len(record.tokens) == record.prompt_length for record in update.sequences(0))
    rollout = ended.out / "generate_sequences" / "step_0"
    assert {record.tokens for record in Dump(rollout / "requests-0").sequences(0)} == prompts
    assert not (ended.out / "update_actor" / "step_1").exists()
    fingerprints = {}
    for record in Dump(ended.out / "weights" / "train").weights(0):
        fingerprints.setdefault(record.name, []).append(record.fingerprint)
    assert all(first == second != third for first, second, third in fingerprints.values())
    result = json.loads((ended.out / "report" / "step_0" / "result.json").read_text())
    assert result["verdict"] in ("equal", "rounding")
    assert result["coverage"]["rows_matched"] > 0


FAULTS = {
    "temperature": (
        {
            "overrides": (
                "actor_rollout_ref.rollout.temperature=0.7",
                "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
                "trainer.total_training_steps=1",
            )
        },
        0,
        "logprob.temperature",
    ),
    "padded_vocabulary": (
        {"vocabulary": 1024, "overrides": ("trainer.total_training_steps=1",)},
        0,
        "head.padded_vocab",
    ),
    "skipped_parameter": ({"environment": {"VERL_CPU_FAULT": "skipped_parameter"}}, 1, "weights.stale"),
    "rope_scaling": (
        {
            "overrides": (
                "+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rope_parameters.rope_type=linear",
                "+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rope_parameters.factor=2.0",
                "+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rope_parameters.rope_theta=10000.0",
                "trainer.total_training_steps=1",
            )
        },
        0,
        "rope.scaling",
    ),
    "bf16": (
        {"overrides": ("actor_rollout_ref.rollout.dtype=bfloat16", "trainer.total_training_steps=1")},
        0,
        "module.dtype",
    ),
    "swapped_prompts": (
        {
            "environment": {"VERL_CPU_FAULT": "swapped_prompts"},
            "overrides": (
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
                "trainer.total_training_steps=1",
            ),
        },
        0,
        "tokens.wrong_sample",
    ),
}
"""Name -> how it is planted, the step that shows it, the family of its cause."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_cause(runs, name):
    arguments, step, family = FAULTS[name]
    ended = runs(name, options=("--passes", "old_log_prob"), **arguments)
    # A dtype of one whole side is rounding with a reason; everything else is no rounding at all.
    code, verdict = (0, "rounding") if name == "bf16" else (1, "diverged")
    assert ended.code == code, ended.printed[-4000:]
    result = ended.result(step, "old_log_prob")
    assert result["verdict"] == verdict, json.dumps(result["causes"], indent=1)
    if name == "bf16":
        assert result["logprobs"]["abs_diff_max"] > 1e-3
    assert ended.causes(step, "old_log_prob")[0].startswith(family), json.dumps(result["causes"], indent=1)
    if name == "skipped_parameter":
        assert result["causes"][0]["module"] == "model.layers.1.mlp.down_proj"
        assert "DIFFER in model.layers.1.mlp.down_proj.weight" in ended.printed
        assert all(proof.holds for proof in sync_proofs(ended.out) if proof.version == 0)
