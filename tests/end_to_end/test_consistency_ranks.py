"""Several ranks: each captures its share of both sides, and the comparison joins them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from consistency_runs import configured, make_world, result

from trainfer.config.load import effective_yaml


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("overrides", "sides"),
    [
        (("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",), ("rollout", "train")),
        (
            (
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
                "trainfer.consistency.prompts_only=true",
            ),
            ("generate_sequences", "update_actor"),
        ),
        (("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",), ("rollout", "train")),
    ],
    ids=["sharded", "shared sequences, prompts only", "shared sequences"],
)
def test_two_ranks_are_equal_in_every_row(world, tmp_path, overrides, sides):
    run = tmp_path / "run"
    loaded = configured(
        world,
        run,
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=1",
        "trainfer.consistency.steps=[1]",
        *overrides,
    )
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(effective_yaml(loaded))))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}"]
    command += ["--no-python", str(Path(sys.executable).with_name("trainfer")), "train", str(config)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        told, _ = launcher.communicate(timeout=240)
    finally:
        launcher.terminate()  # it ends the ranks
        launcher.wait()
    assert launcher.returncode == 0, told
    assert "consistency step 1: equal" in told
    found = result(run, 1)
    coverage = found["coverage"]
    assert coverage["rows_matched"] == coverage["rows_rollout"] > 0
    assert coverage["modules_unmatched"] == []
    for side in sides:
        folder = run / "consistency" / "step_1" / side
        assert {path.name for path in folder.iterdir()} == {
            "manifest.json",
            "manifest-rank1.json",
            "rank0",
            "rank1",
        }
    if sides == ("rollout", "train"):
        assert found["stages"][0]["summary"] == "8 recorded sequences have equal ids"
