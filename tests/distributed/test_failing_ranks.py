"""A rank that fails while the others wait for it: the run says whose failure it was, and ends."""

import json
import sys
from dataclasses import dataclass

import pytest
import rank_cases
import torch.distributed as dist
from rank_cases import setup_of, spawn

from trainfer.errors import CheckpointError, TrainferError, WorkerError
from trainfer.integrations.transformers.load import save_model, tiny_model
from trainfer.workers import ray_group, torchrun_group
from trainfer.workers.launched import launched_by_torchrun
from trainfer.workers.rank import RankWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class Fail:
    """A command: some ranks cannot write, the others wait for them."""

    ranks: tuple[int, ...]

    def run(self, worker: RankWorker) -> str:
        if worker.rank in self.ranks:
            raise CheckpointError("the disk is full")
        dist.barrier()
        return "done"


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """A command: rank 1 has a fault of its own."""

    def run(self, worker: RankWorker) -> None:
        if worker.rank == 1:
            raise ZeroDivisionError("by zero")
        dist.barrier()


def drive(transport, told):
    """What a group sees of failures, one after the other."""
    for name, ranks in (("both", (0, 1)), ("none", ()), ("one", (1,))):
        try:
            told[name] = transport.call([Fail(ranks=ranks)] * 2)
        except TrainferError as error:
            told[name] = [type(error).__name__, str(error)]
    return told


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny_model("qwen3", hidden_size=32, intermediate_size=64), folder)
    return folder


@pytest.mark.slow
def test_under_torchrun(model, tmp_path):
    command = [sys.executable, __file__, str(model), str(tmp_path)]
    first, _ = spawn(command, 2, timeout=120)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["both"] == ["CheckpointError", "the disk is full"]  # every rank came back: the group goes on
    assert told["none"] == ["done", "done"]
    assert first.returncode == 2
    assert "error: rank 1: the disk is full" in first.stdout
    assert "No checkpoint had been written" in first.stdout


@pytest.mark.slow
@pytest.mark.ray
def test_under_ray(model, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_group, "GRACE_SECONDS", 2)
    here = str(rank_cases.Path(__file__).parent)
    path = f"+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH={here}"
    setup = setup_of(model, [path], 2)
    told = drive(ray_group.start_ray(setup, tmp_path), {})
    assert told["both"] == ["CheckpointError", "the disk is full"]
    assert told["none"] == ["done", "done"]
    assert told["one"] == ["CheckpointError", "the disk is full"]  # rank 0 is stuck: every worker was ended
    transport = ray_group.start_ray(setup, tmp_path)
    with pytest.raises(WorkerError, match=r"(?s)rank 1 failed.*by zero"):
        transport.call([Crash()] * 2)
    transport.close()


def main(model, folder):
    import os
    from pathlib import Path

    sys.modules["test_failing_ranks"] = sys.modules["__main__"]  # commands are found under one name
    for command in (Fail, Crash):
        command.__module__ = "test_failing_ranks"
    torchrun_group.GRACE_SECONDS = 2.0
    launched = launched_by_torchrun()
    if launched.rank:
        torchrun_group.serve(launched, "cpu")
        os._exit(0)
    told = {}
    transport = torchrun_group.TorchrunTransport(setup_of(model, [], 2), launched, Path(folder))
    original = transport._give_up

    def tell_first(words):
        (Path(folder) / "told.json").write_text(json.dumps(told))
        original(words)

    transport._watch._give_up = tell_first
    drive(transport, told)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
