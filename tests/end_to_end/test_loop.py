"""The whole loop on a tiny model: it learns, agrees with itself, repeats and resumes bit for bit."""

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from trainfer.config.load import load_config
from trainfer.errors import RunFolderError
from trainfer.run import run_steps, train
from trainfer.train.journal.metrics import read_metrics
from trainfer.workers.session import open_session

WORDS = ["ab", "ba", "ac", "ca", "bc", "cb", "ad", "da"]


def write_rows(path, words):
    rows = [
        {
            "data_source": "trainfer/letters",
            "prompt": [{"role": "user", "content": word}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"index": index, "demonstrations": [word, word[::-1], word[0] * 2]},
        }
        for index, word in enumerate(words)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "train.parquet", WORDS)
    write_rows(folder / "val.parquet", WORDS[:4])
    return folder


def configured(data, run, *overrides):
    base = [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.dtype=fp32",
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
        f"trainer.default_local_dir={run}",
        "trainer.device=cpu",
        "trainfer.warmup.hidden_size=32",
        "trainfer.warmup.intermediate_size=64",
        "trainfer.warmup.steps=40",
        "trainfer.warmup.batch_size=16",
        "trainfer.warmup.lr=1e-2",
    ]
    return load_config(None, [*base, *overrides])


def without_timings(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))}


def lines(run):
    return {step: without_timings(metrics) for step, metrics in read_metrics(Path(run) / "metrics.jsonl")}


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """One run of 40 steps, and its reports."""
    run = tmp_path_factory.mktemp("runs") / "run"
    loaded = configured(
        data,
        run,
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        "trainer.total_training_steps=40",
        "trainer.total_epochs=40",
        "trainer.test_freq=20",
        "trainer.save_freq=100",
        "trainfer.warmup.steps=100",
    )
    return run, list(train(loaded))


def test_the_score_rises_and_held_out_accuracy_with_it(finished):
    _, reports = finished
    scores = [report.metrics["critic/score/mean"] for report in reports]
    assert sum(scores[-10:]) / 10 > sum(scores[:10]) / 10 + 0.25
    name = "trainfer/letters/reward/mean@1"
    before = reports[0].metrics[f"val-before-train/{name}"]
    assert reports[-1].metrics[f"val-core/{name}"] > before


def test_at_every_step_rollout_and_trainer_agree_and_the_weights_are_proven(finished):
    _, reports = finished
    for report in reports:
        assert report.metrics["mismatch/logp_abs_diff_max"] <= 2e-5
        assert report.metrics["mismatch/tokens"] == sum(len(r.sequence.response_ids) for r in report.records)
        assert report.metrics["weights/fingerprint_match"] == 1.0
        assert report.proof.weights_version == report.metrics["weights/version"]
    assert [report.proof.weights_version for report in reports] == list(range(1, 41))


def test_each_sequence_was_sampled_by_the_weights_of_the_step_before(finished):
    _, reports = finished
    for report in reports:
        assert {r.sequence.weights_version for r in report.records} == {report.step - 1}


def test_the_run_folder_tells_what_the_generator_told(finished):
    run, reports = finished
    written = dict(read_metrics(run / "metrics.jsonl"))
    assert written == {report.step: report.metrics for report in reports}
    rollouts = (run / "rollouts" / "3.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in rollouts] == [r.score for r in reports[2].records]
    assert reports[-1].checkpoint == run / "checkpoints" / "global_step_40"
    assert reports[0].checkpoint is None


def test_two_runs_with_equal_configuration_are_bitwise_equal(data, tmp_path):
    for name in ("one", "other"):
        list(train(configured(data, tmp_path / name)))
    assert lines(tmp_path / "one") == lines(tmp_path / "other")


def test_another_seed_is_another_run(data, tmp_path):
    list(train(configured(data, tmp_path / "one", "trainer.total_training_steps=1")))
    list(train(configured(data, tmp_path / "other", "trainer.total_training_steps=1", "trainfer.seed=7")))
    assert lines(tmp_path / "one") != lines(tmp_path / "other")


@pytest.mark.parametrize(
    "extra",
    [
        (),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.shuffle=true",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
        ),
    ],
    ids=["plain", "many optimizer steps"],
)
def test_an_interrupted_run_goes_on_bitwise_as_if_nothing_had_happened(data, tmp_path, extra):
    straight = configured(data, tmp_path / "straight", "trainer.save_freq=2", *extra)
    list(train(straight))
    interrupted = configured(data, tmp_path / "interrupted", "trainer.save_freq=2", *extra)
    with open_session(interrupted) as session:
        for report in run_steps(session):
            if report.step == 3:
                break
    list(train(interrupted))
    assert lines(tmp_path / "straight") == lines(tmp_path / "interrupted")
    saved = [checkpoint_tensors(tmp_path / name) for name in ("straight", "interrupted")]
    assert saved[0].keys() == saved[1].keys()
    assert any("exp_avg_sq" in name for name in saved[0])
    for name, tensor in saved[0].items():
        assert torch.equal(tensor, saved[1][name]), name


def checkpoint_tensors(run):
    files = (run / "checkpoints" / "global_step_4" / "actor").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(data, tmp_path):
    loaded = configured(data, tmp_path / "run", "trainer.save_freq=2")
    list(train(loaded))
    before = lines(tmp_path / "run")
    shard = next((tmp_path / "run" / "checkpoints" / "global_step_4" / "actor").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-10])
    assert [report.step for report in train(loaded)] == [3, 4]
    assert lines(tmp_path / "run") == before


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_around_the_end_of_an_epoch_too_a_resumed_run_takes_the_same_prompts(
    data, tmp_path, stop_after, shuffle
):
    overrides = (
        "trainer.total_epochs=2",
        "trainer.total_training_steps=null",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        f"data.shuffle={shuffle}",
        "trainfer.warmup.steps=0",
    )
    straight = list(train(configured(data, tmp_path / "straight", *overrides)))
    assert [report.step for report in straight] == [1, 2, 3, 4]
    assert [report.metrics["training/epoch"] for report in straight] == [0, 0, 1, 1]
    interrupted = configured(data, tmp_path / "interrupted", *overrides)
    with open_session(interrupted) as session:
        for report in run_steps(session):
            if report.step == stop_after:
                break
    resumed = list(train(interrupted))
    assert [report.step for report in resumed] == list(range(stop_after + 1, 5))
    for before, after in zip(straight[stop_after:], resumed, strict=True):
        assert [r.sequence.prompt.index for r in before.records] == [
            r.sequence.prompt.index for r in after.records
        ]
    assert lines(tmp_path / "straight") == lines(tmp_path / "interrupted")


def test_without_a_frequency_nothing_is_saved_or_validated_as_in_verl(data, tmp_path):
    run = tmp_path / "run"
    loaded = configured(data, run, "trainer.save_freq=-1", "trainer.test_freq=-1")
    reports = list(train(loaded))
    assert [report.checkpoint for report in reports] == [None] * 4
    assert [report.validation for report in reports] == [None] * 4
    assert list(run.glob("checkpoints/*")) == []


def test_no_step_left_is_an_error_that_says_why(data, tmp_path):
    loaded = configured(data, tmp_path / "run", "trainer.total_training_steps=1", "trainer.save_freq=1")
    list(train(loaded))
    with pytest.raises(RunFolderError, match="total_training_steps=1"):
        list(train(loaded))


def test_any_micro_batch_size_trains_the_same_run(data, tmp_path):
    scores = []
    for name, overrides in (
        ("tokens", ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",)),
        ("one", ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",)),
        ("all", ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",)),
    ):
        reports = list(train(configured(data, tmp_path / name, *overrides)))
        scores.append([report.metrics["critic/score/mean"] for report in reports])
        shutil.rmtree(tmp_path / name)
    assert scores[0] == scores[1] == scores[2]


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.temperature=0.8"),
        ("algorithm.rollout_correction.rollout_is=token",),
        ("algorithm.rollout_correction.bypass_mode=true",),
        ("algorithm.use_kl_in_reward=true",),
        ("actor_rollout_ref.rollout.name=hf",),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=true",),
    ],
    ids=["filters", "importance weights", "bypass", "kl in reward", "hf engine", "recomputation"],
)
def test_every_path_through_a_step_agrees_with_the_rollout(data, tmp_path, overrides):
    reports = list(train(configured(data, tmp_path / "run", "trainer.total_training_steps=2", *overrides)))
    for report in reports:
        assert report.metrics["mismatch/logp_abs_diff_max"] <= 2e-5
        assert report.metrics["weights/fingerprint_match"] == 1.0
        assert report.metrics["mismatch/tokens"] > 0


def test_a_bfloat16_run_shows_what_it_measures(data, tmp_path):
    overrides = (
        "actor_rollout_ref.actor.fsdp_config.dtype=bf16",
        "actor_rollout_ref.rollout.dtype=bf16",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.total_training_steps=2",
    )
    for report in train(configured(data, tmp_path / "run", *overrides)):
        assert 0 < report.metrics["mismatch/logp_abs_diff_max"] < 1.0
        assert report.metrics["weights/fingerprint_match"] == 1.0


def test_the_callers_generator_does_not_matter(data, tmp_path):
    torch.manual_seed(1)
    list(train(configured(data, tmp_path / "one", "trainer.total_training_steps=2")))
    torch.manual_seed(2)
    list(train(configured(data, tmp_path / "other", "trainer.total_training_steps=2")))
    assert lines(tmp_path / "one") == lines(tmp_path / "other")
