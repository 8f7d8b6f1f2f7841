"""Whole runs on two ranks: as in one process, killed, resumed on another number of ranks, and proven at each hand-over."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from rank_cases import free_port

from trainfer.config.load import load_config
from trainfer.errors import WorkerError
from trainfer.run import run_steps, train
from trainfer.train.journal.checkpoints import why_damaged
from trainfer.train.journal.metrics import read_metrics
from trainfer.workers.session import open_session

WORDS = ["ab", "ba", "ac", "ca", "bc", "cb", "ad", "da"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "data_source": "trainfer/letters",
            "prompt": [{"role": "user", "content": word}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"index": index, "demonstrations": [word, word[::-1], word[0] * 2]},
        }
        for index, word in enumerate(WORDS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return folder


def overrides(data, run, *more):
    return [
        f"data.train_files={data / 'train.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        "data.shuffle=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.dtype=fp32",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={run}",
        "trainer.device=cpu",
        "trainfer.warmup.hidden_size=32",
        "trainfer.warmup.intermediate_size=64",
        "trainfer.warmup.steps=100",
        "trainfer.warmup.batch_size=16",
        "trainfer.warmup.lr=1e-2",
        *more,
    ]


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """Four steps in one process."""
    run = tmp_path_factory.mktemp("straight") / "run"
    list(train(load_config(None, overrides(data, run))))
    return run


def check_same_run(run, other):
    found, wanted = (dict(read_metrics(folder / "metrics.jsonl")) for folder in (run, other))
    assert found.keys() == wanted.keys() == {1, 2, 3, 4}
    for step, metrics in wanted.items():
        assert metrics["mismatch/logp_abs_diff_max"] <= 2e-5
        assert found[step]["weights/fingerprint_match"] == 1.0
        assert max(abs(metrics["critic/advantages/max"]), abs(metrics["actor/grad_norm"])) > 0
        for name, value in metrics.items():
            if not name.startswith(("timing_s/", "perf/", "mismatch/")):
                # Sums whose terms cancel, such as a loss of advantages around 0, are exact in the terms' size only.
                assert math.isclose(found[step][name], value, rel_tol=1e-6, abs_tol=1e-7), (step, name)
        sequences = [
            (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines() for folder in (run, other)
        ]
        texts = [[json.loads(line)["response"] for line in lines] for lines in sequences]
        assert texts[0] == texts[1]


def kill_rank_1_after_step_3(loaded, run):
    with open_session(loaded) as session:
        for report in run_steps(session):
            if report.step == 3:
                log = (run / "logs" / "rank_1.log").read_text()
                os.kill(int(re.findall(r"process (\d+)", log)[-1]), signal.SIGKILL)


@pytest.mark.ray
def test_a_run_whose_worker_is_killed_says_so_and_goes_on_with_one_rank(data, straight, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(WorkerError) as caught:
        kill_rank_1_after_step_3(load_config(None, overrides(data, run, "trainer.n_gpus_per_node=2")), run)
    message = str(caught.value)
    assert "rank 1 is gone" in message
    assert "rank_1.log" in message
    assert f"{run / 'checkpoints' / 'global_step_2'}" in message
    assert [report.step for report in train(load_config(None, overrides(data, run)))] == [3, 4]
    check_same_run(run, straight)


def test_torchrun_goes_on_with_what_one_process_began(data, straight, tmp_path):
    run = tmp_path / "run"
    list(train(load_config(None, overrides(data, run, "trainer.total_training_steps=2"))))
    config = tmp_path / "empty.yaml"
    config.write_text("data: {}\n")
    behind = "actor_rollout_ref.actor.checkpoint.async_save=true"
    ended = torchrun(
        config, *overrides(data, run, "trainer.n_gpus_per_node=2", "trainer.save_freq=1", behind)
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    check_same_run(run, straight)
    for step in (3, 4):  # saved behind the training, by both ranks
        checkpoint = run / f"checkpoints/global_step_{step}"
        assert why_damaged(checkpoint) is None
        assert len(list(checkpoint.glob("actor/shard-*.safetensors"))) == 2
    shutil.rmtree(run / "checkpoints/global_step_4")
    list(train(load_config(None, overrides(data, run))))  # resumed from what was saved behind the training
    check_same_run(run, straight)


def test_a_port_of_0_is_refused_before_anything_waits(data, tmp_path):
    config = tmp_path / "empty.yaml"
    config.write_text("data: {}\n")
    ended = torchrun(config, *overrides(data, tmp_path / "run", "trainer.n_gpus_per_node=2"), port=0)
    assert ended.returncode != 0
    assert "MASTER_PORT=0" in ended.stdout


def test_torchrun_with_another_number_of_processes_is_refused_with_the_remedy(data, tmp_path):
    config = tmp_path / "empty.yaml"
    config.write_text("data: {}\n")
    ended = torchrun(config, *overrides(data, tmp_path / "run"))
    assert ended.returncode != 0
    assert "Set trainer.n_gpus_per_node=2 and trainer.nnodes=1" in ended.stdout
    assert not (tmp_path / "run").exists()


def torchrun(*arguments, port=None):
    port = free_port() if port is None else port
    starter = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    where = ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "trainfer.cli.main", "train"]
    return subprocess.run(
        [*starter, *where, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=Path(arguments[0]).parent,
        check=False,
    )
