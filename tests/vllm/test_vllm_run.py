"""The demonstration with vLLM as its engine, by override alone: on one rank, and on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainfer.config.load import load_config
from trainfer.run import train

DEMO = Path(__file__).parents[2] / "examples" / "tiny_cpu.yaml"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demonstration_trains_on_vllms_samples(tmp_path, dtype):
    run = tmp_path / "run"
    overrides = [
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        "trainer.total_training_steps=5",
        "trainfer.warmup.steps=60",
        f"trainer.default_local_dir={run}",
    ]
    reports = list(train(load_config(DEMO, overrides)))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert len(reports) == 5
    for line in lines:
        assert line["weights/fingerprint_match"] == 1.0
        assert line["weights/version"] == line["step"]
        if dtype == "float32":
            assert line["mismatch/logp_abs_diff_max"] <= 2e-5
        else:
            assert 1e-4 < line["mismatch/logp_abs_diff_mean"] < 0.1


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, (sys.executable, "-m")], ids=["torchrun", "Ray"])
def test_two_ranks_with_an_engine_each_train_and_prove(tmp_path, launcher):
    run = tmp_path / "run"
    overrides = [
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        "trainfer.warmup.steps=60",
        f"trainer.default_local_dir={run}",
    ]
    command = [*launcher, "trainfer.cli.main", "train", str(DEMO), *overrides]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_AUTH_MODE": "disabled"}
    environment = {**os.environ, **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["weights/fingerprint_match"] for line in lines] == [1.0, 1.0, 1.0]
    assert max(line["mismatch/logp_abs_diff_max"] for line in lines) <= 2e-5
