"""The verbs on the demonstration's data, with a model that the warm-up makes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainfer.cli.command_line import program_name
from trainfer.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = f"""\
data:
  train_files: {EXAMPLES}/tiny_cpu_train.parquet
  val_files: {EXAMPLES}/tiny_cpu_val.parquet
  train_batch_size: 2
  max_prompt_length: 64
  max_response_length: 8
  val_max_samples: 6
actor_rollout_ref:
  actor: {{ppo_mini_batch_size: 2, fsdp_config: {{dtype: float32}}}}
  rollout: {{n: 2, dtype: float32}}
trainer: {{total_training_steps: 2, save_freq: 2, val_before_train: false, device: cpu}}
trainfer: {{warmup: {{steps: 4, num_layers: 1, hidden_size: 16, intermediate_size: 16}}}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def call(capfd):
    def _call(*words):
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    return _call


def test_a_run_is_trained_scored_and_sampled_from(folder, call):
    code, out, err = call("train", "run.yaml")
    assert code == 0, err
    assert "step 2/2" in out
    assert "trainfer eval run.yaml" in out
    run = folder / "runs/trainfer/grpo"
    assert (run / "report.html").is_file()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["train_batch_size"] == 2

    latest = json.loads(call("eval", "run.yaml", "--json")[1])
    named = json.loads(
        call("eval", "run.yaml", "--json", "--checkpoint", "runs/trainfer/grpo/checkpoints/global_step_2")[1]
    )
    assert latest == named
    assert latest["responses"] == 6
    assert list(latest["by_data_source"]) == ["trainfer/letters"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for override in ("data.max_response_length=8", "data.max_response_length=9"):  # 9: another model is made
        answer = json.loads(call("eval", "run.yaml", override, "--json", "--checkpoint", "base")[1])
        assert answer["weights"] == "base"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before

    assert call("generate", str(run), "-p", "ab", "--max-new-tokens", "2")[0] == 0
    code, out, err = call("train", "run.yaml")
    assert (code, out) == (2, "")
    assert "no step is left" in err


def test_the_closing_lines_start_the_program_as_it_was_started(tmp_path, monkeypatch):
    script = tmp_path / "bin" / "trainfer"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    assert program_name(str(script)) == str(script)
    monkeypatch.setenv("PATH", str(script.parent))
    assert program_name(str(script)) == "trainfer"
    assert program_name("src/trainfer/cli/main.py") == "trainfer"


def test_the_base_model_is_scored_before_any_run(folder, call):
    code, out, _ = call("eval", "run.yaml", "data.val_max_samples=2")
    assert (code, out.split(":")[0]) == (0, "base")
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "run.yaml", "~data.val_files"], "data.val_files"),
        (["eval", "run.yaml", "--checkpoint", "latest"], "runs/trainfer/grpo"),
        (["eval", "run.yaml", "--checkpoint", "nix"], "nix is not a folder"),
        (["eval", "run.yaml", "data.val_files=nix.parquet"], "nix.parquet"),
        (["train", "run.yaml", "data.train_files=nix.parquet"], "nix.parquet"),
        (["train", "run.yaml", "~trainfer.warmup", "actor_rollout_ref.model.path=nix"], "nix"),
        (["train", "run.yaml", "trainer.default_local_dir=run.yaml"], "run.yaml"),
        (["train", "run.yaml", "data.max_prompt_length=2"], "max_prompt_length"),
        (["train", "run.yaml", "data.prompt_key=question"], "question"),
        (
            [
                "train",
                "run.yaml",
                "trainer.n_gpus_per_node=3",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            ],
            "does not deal evenly to 3",
        ),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(folder, call, words, said):
    code, out, err = call(*words)
    assert code == 2, err
    assert said in err
    assert "Traceback" not in out + err
    assert err.count("error:") == 1


def test_an_interrupted_run_ends_with_130_and_goes_on_when_started_again(folder, call):
    words = [
        "train",
        "run.yaml",
        "trainer.total_training_steps=4000",
        "trainer.total_epochs=100000",
        "trainer.save_freq=1",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "trainfer.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a test run in the background ignores it
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("step    3/"):
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == 130, errors
    assert "Traceback" not in rest + errors
    assert (
        f"goes on from the newest checkpoint:\n  {sys.executable} -m trainfer.cli.main {' '.join(words)}\n"
        in errors
    )
    done = len((folder / "runs/trainfer/grpo/metrics.jsonl").read_text().splitlines())
    code, out, err = call(*words[:2], f"trainer.total_training_steps={done + 1}", *words[3:])
    assert code == 0, err
    assert f"step {done + 1}/{done + 1}" in out
