"""The demonstration with vLLM as its engine, by override alone."""

import json
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
        "trainfer.warmup.num_heads=2",
        "trainfer.warmup.num_kv_heads=1",
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
