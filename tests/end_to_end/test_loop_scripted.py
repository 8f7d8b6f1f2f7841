"""The loop with answers from a script: rewards and advantages worked by hand, and mistakes told before a model loads."""

import json
import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from trainfer.config.load import load_config
from trainfer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    PlanError,
    RunFolderError,
    TrainferError,
)
from trainfer.integrations.transformers.load import byte_tokenizer, save_model, tiny_model
from trainfer.run import train
from trainfer.workers import build_rank


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model folder, two prompts and eight scripted answers."""
    folder = tmp_path_factory.mktemp("world")
    save_model(tiny_model("llama"), folder / "model", tokenizer=byte_tokenizer())
    rows = [
        {
            "data_source": "trainfer/letters",
            "prompt": [{"role": "user", "content": word}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"index": index},
        }
        for index, word in enumerate(("ab", "cd"))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    answers = ["ba", "ab", "xx", "yy", "dc", "dc", "cd", "dc"]
    lines = [json.dumps({"response": answer}) for answer in answers]
    (folder / "script.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def configured(world, run, *overrides):
    return load_config(
        None,
        [
            f"data.train_files={world / 'train.parquet'}",
            "data.train_batch_size=2",
            "data.shuffle=false",
            "data.max_prompt_length=16",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={world / 'model'}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.name=scripted",
            "actor_rollout_ref.rollout.dtype=fp32",
            f"trainfer.scripted_responses={world / 'script.jsonl'}",
            "trainer.total_training_steps=1",
            "trainer.device=cpu",
            f"trainer.default_local_dir={run}",
            *overrides,
        ],
    )


def test_scripted_answers_get_the_rewards_and_advantages_worked_by_hand(world, tmp_path):
    (report,) = train(configured(world, tmp_path / "run"))
    assert [r.score for r in report.records] == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    spread = 0.5 + 1e-6  # of three equal values and one that differs by 1, n-1
    expected = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, -0.75, 0.25]
    assert [r.advantage for r in report.records] == pytest.approx([value / spread for value in expected])
    assert report.metrics["critic/score/mean"] == 0.5
    assert report.metrics["critic/rewards/max"] == 1.0
    assert report.metrics["critic/advantages/max"] == pytest.approx(0.75 / spread)
    # Two letters and the end token each: every sequence weighs the same, so the mean advantage is 0.
    assert report.metrics["response_length/mean"] == 3.0
    assert report.metrics["response_length/clip_ratio"] == 0.0
    assert report.metrics["actor/pg_loss"] == pytest.approx(0.0, abs=1e-6)
    assert report.metrics["actor/grad_norm"] > 0.01
    assert [r.sequence.response_text for r in report.records][:2] == ["ba", "ab"]
    assert {r.sequence.group for r in report.records[:4]} == {0}


def test_the_agreement_check_sees_that_nobody_sampled_the_script(world, tmp_path):
    (report,) = train(configured(world, tmp_path / "run"))
    # A random model of 261 tokens gives each about 1/261; the script claims probability 1.
    assert report.metrics["mismatch/logp_abs_diff_mean"] == pytest.approx(math.log(261), rel=0.05)
    assert report.metrics["mismatch/tokens"] == 24.0
    assert report.metrics["weights/fingerprint_match"] == 1.0


def test_exact_true_refuses_such_a_rollout(world, tmp_path):
    with pytest.raises(TrainferError, match=r"100\.000% of this step's tokens"):
        list(train(configured(world, tmp_path / "run", "trainfer.exact=true")))


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("data.train_files=missing.parquet", DataError, "missing.parquet"),
        ("data.train_batch_size=3", PlanError, "ppo_mini_batch_size"),
        ("data.train_batch_size=64", DataError, "64"),
        ("data.max_prompt_length=2", DataError, "max_prompt_length=2"),
        ("actor_rollout_ref.model.path=nowhere", ModelError, "nowhere"),
        ("actor_rollout_ref.model.path=null", ConfigError, "trainfer.warmup"),
        ("data.max_response_length=2048", ConfigError, "knows 2048 positions"),
        ("trainer.n_gpus_per_node=2", ConfigError, "answers in the order of its file"),
        ("trainer.resume_mode=resume_path", CheckpointError, "resume_from_path"),
        ("trainer.total_training_steps=0", ConfigError, "total_training_steps"),
    ],
)
def test_mistakes_are_told_before_any_model_is_loaded(world, tmp_path, monkeypatch, override, error, words):
    def load_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(build_rank, "load_model", load_model)
    with pytest.raises(error, match=words):
        list(train(configured(world, tmp_path / "run", override)))


def test_a_run_folder_that_is_a_file_is_refused_before_any_model_is_loaded(world, tmp_path, monkeypatch):
    monkeypatch.setattr(build_rank, "load_model", None)
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(RunFolderError, match="existing file"):
        list(train(configured(world, tmp_path / "run")))


def test_a_damaged_script_names_its_line(world, tmp_path):
    script = tmp_path / "script.jsonl"
    script.write_text('{"response": "ba"}\n{"answer": "ab"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(train(configured(world, tmp_path / "run", f"trainfer.scripted_responses={script}")))


def test_a_run_may_start_from_any_whole_checkpoint(world, tmp_path):
    list(train(configured(world, tmp_path / "first", "trainer.save_freq=1")))
    checkpoint = tmp_path / "first" / "checkpoints" / "global_step_1"
    overrides = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint}",
        "trainer.total_training_steps=2",
    )
    (report,) = train(configured(world, tmp_path / "second", *overrides))
    assert report.step == 2
    assert report.metrics["weights/version"] == 2.0
    renamed = tmp_path / "somewhere"
    checkpoint.rename(renamed)
    with pytest.raises(CheckpointError, match="not named global_step_N"):
        list(
            train(
                configured(world, tmp_path / "third", *overrides[:1], f"trainer.resume_from_path={renamed}")
            )
        )


def test_an_error_gives_the_run_folder_free(world, tmp_path):
    with pytest.raises(ModelError):
        list(
            train(
                configured(world, tmp_path / "run", "actor_rollout_ref.model.path=" + str(broken(tmp_path)))
            )
        )
    assert len(list(train(configured(world, tmp_path / "run")))) == 1


def broken(tmp_path: Path) -> Path:
    """A model folder with tokenizer and config but damaged weights."""
    folder = tmp_path / "broken"
    save_model(tiny_model("llama"), folder, tokenizer=byte_tokenizer())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    return folder
