"""A worker of two is killed at random moments, again and again: the run ends, resumes, and comes to what it would have come to.

No kill costs more than the steps since the last checkpoint: with a save after every step that is one, and one more where
saves are written behind the training.
"""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rank_cases import free_port

from trainfer.config.load import load_config
from trainfer.run import train
from trainfer.train.journal.checkpoints import list_checkpoints, why_damaged
from trainfer.train.journal.metrics import read_metrics

WORDS = ["ab", "ba", "ac", "ca", "bc", "cb", "ad", "da"]
STEPS, KILLS = 40, 4
ASYNC = "actor_rollout_ref.actor.checkpoint.async_save=true"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {
            "data_source": "trainfer/letters",
            "prompt": [{"role": "user", "content": word}],
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"index": index, "demonstrations": [word, word[::-1]]},
        }
        for index, word in enumerate(WORDS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def overrides(data, run, *more):
    return [
        f"data.train_files={data}",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.dtype=fp32",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=3",
        f"trainer.default_local_dir={run}",
        "trainer.device=cpu",
        "trainfer.warmup.hidden_size=32",
        "trainfer.warmup.intermediate_size=64",
        "trainfer.warmup.steps=20",
        *more,
    ]


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """The same run in one process."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    list(train(load_config(None, overrides(data, run))))
    return dict(read_metrics(run / "metrics.jsonl"))


def start(data, run, *more, launcher):
    config = run.parent / "empty.yaml"
    config.write_text("data: {}\n")
    torchrun = ["torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    words = ["trainfer.cli.main", "train", str(config)]
    words += overrides(data, run, "trainer.n_gpus_per_node=2", *more)
    where = [*torchrun, f"--master-port={free_port()}", "-m"] if launcher == "torchrun" else []
    with (run.parent / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *where, *words],
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_AUTH_MODE": "disabled"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def workers_of(process, run, launcher):
    """Process ids of the two ranks, as far as they have come to be."""
    if launcher == "torchrun":
        children = psutil.Process(process.pid).children()
        return [child.pid for child in children if "trainfer.cli.main" in child.cmdline()]
    logs = [run / "logs" / f"rank_{rank}.log" for rank in range(2)]
    found = [re.findall(r"process (\d+)", log.read_text()) for log in logs if log.is_file()]
    return [int(ids[-1]) for ids in found if ids and psutil.pid_exists(int(ids[-1]))]


def steps_written(run):
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def newest_whole(run):
    whole = [step for step, folder in list_checkpoints(run / "checkpoints") if why_damaged(folder) is None]
    return max(whole, default=0)


def kill_a_worker(process, run, chance, launcher):
    """At a random moment of a random step; False where the run had ended before."""
    further = steps_written(run) + chance.choice([1, 1, 2])
    deadline = time.monotonic() + 240
    while process.poll() is None and steps_written(run) < further and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 0.3))
    if process.poll() is not None:
        return False
    pids = workers_of(process, run, launcher)
    if not pids and steps_written(run) == STEPS:
        return False
    assert pids, (run.parent / "log").read_text()[-3000:]
    os.kill(chance.choice(pids), signal.SIGKILL)
    return True


def end(process):
    """The others notice and end by themselves; nothing is left running."""
    try:
        return process.wait(timeout=240)
    finally:
        for child in [p for p in psutil.process_iter() if session_of(p) == process.pid]:
            child.kill()


def session_of(process):
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_a_worker_killed_again_and_again_costs_the_steps_since_the_last_checkpoint(
    launcher, data, undisturbed, tmp_path
):
    run, chance = tmp_path / "run", random.Random(f"{launcher} 20261201")
    kills = 0
    for number in range(KILLS):
        behind = number % 2 == 1
        process = start(data, run, *([ASYNC] if behind else []), launcher=launcher)
        try:
            killed = kill_a_worker(process, run, chance, launcher)
        finally:
            code = end(process)
        log = (tmp_path / "log").read_text()[-3000:]
        if killed:
            kills += 1
            assert code != 0, log
            lost = steps_written(run) - newest_whole(run)
            assert lost <= 1 + behind, log
    assert kills == KILLS, "the run ended before it was killed often enough"
    assert end(start(data, run, launcher=launcher)) == 0, (tmp_path / "log").read_text()[-3000:]
    found = dict(read_metrics(run / "metrics.jsonl"))
    assert list(found) == list(range(1, STEPS + 1))
    for step, metrics in undisturbed.items():
        for name, value in metrics.items():
            if not name.startswith(("timing_s/", "perf/", "mismatch/")):
                assert math.isclose(found[step][name], value, rel_tol=1e-5, abs_tol=1e-6), (step, name)
    assert newest_whole(run) == STEPS
    assert not list(Path(run / "checkpoints").glob(".saving*"))
