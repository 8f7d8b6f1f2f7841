"""A run killed at random moments, whatever it was doing, ends as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from trainfer.train.journal.metrics import read_metrics

REPOSITORY = Path(__file__).parents[2]
STEPS = 30
KILLS = 20


def start(run: Path) -> subprocess.Popen[bytes]:
    """The demonstration, small, saving after every step."""
    command = [
        sys.executable, "-m", "trainfer.cli.main", "train", "examples/tiny_cpu.yaml",
        f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=7",
        "trainer.val_before_train=false", "trainer.max_actor_ckpt_to_keep=2", "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "trainfer.warmup.steps=20",
        f"trainer.default_local_dir={run}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (run.parent / f"{run.name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)


def steps_written(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_at_a_random_moment(run: Path, chance: random.Random) -> bool:
    """Start, wait until something moves and then a little longer, kill; False if the run had ended."""
    process = start(run)
    before = steps_written(run)
    further = chance.choice([0, 0, 1, 1, 2])
    deadline = time.monotonic() + 120
    while process.poll() is None and steps_written(run) < before + further and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 4.0) if further == 0 else chance.uniform(0.0, 0.15))
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return alive


def outcome(run: Path) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    """Metrics without timings, and the last checkpoint's tensors as bytes."""
    metrics = [
        {name: value for name, value in line.items() if not name.startswith(("timing_s/", "perf/"))}
        for _, line in read_metrics(run / "metrics.jsonl")
    ]
    files = sorted((run / f"checkpoints/global_step_{STEPS}/actor").glob("*.safetensors"))
    assert files, "the last step left no checkpoint"
    tensors = {name: tensor.tobytes() for file in files for name, tensor in load_file(file).items()}
    return metrics, tensors


@pytest.mark.slow
def test_a_run_killed_twenty_times_equals_an_undisturbed_one_bit_for_bit(tmp_path: Path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert start(undisturbed).wait(timeout=300) == 0
    chance = random.Random(20261129)
    kills = sum(kill_at_a_random_moment(killed, chance) for _ in range(KILLS))
    assert kills == KILLS, "the run ended before it was killed often enough"
    assert start(killed).wait(timeout=300) == 0, (tmp_path / "killed.log").read_text()[-2000:]
    expected_metrics, expected_tensors = outcome(undisturbed)
    metrics, tensors = outcome(killed)
    assert len(metrics) == STEPS
    for line, expected in zip(metrics, expected_metrics, strict=True):
        assert line == expected
    assert tensors.keys() == expected_tensors.keys()
    assert [name for name, content in tensors.items() if content != expected_tensors[name]] == []
