"""FSDP1 keeps parameters in flat ones, cut anywhere: the ranks' fingerprints add up to those of the plain model, by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny

import trainfer
from trainfer.check.align.names import name_map
from trainfer.check.align.weights import weights_by_version
from trainfer.check.compare.source import DumpSide

WORKER = """
import sys, warnings, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[4])
from tiny_models import tiny
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
import trainfer
rank, world, folder, orig = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[5] == "orig"
dist.init_process_group("gloo", init_method="file://" + folder + ".store", rank=rank, world_size=world)
model = tiny("llama")
policy = ModuleWrapPolicy({type(model.model.layers[0])})
model = FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=orig)
ids = torch.tensor([[7, 8, 9, 10]])
with torch.no_grad(), trainfer.capture(model, folder, side="train"):
    model(input_ids=ids)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=["flat"])
def sharded(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp1") / "dump"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    here = str(Path(__file__).parent)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), "2", str(folder), here, request.param], env=environment
        )
        for rank in range(2)
    ]
    assert [worker.wait(timeout=240) for worker in workers] == [0, 0]
    return folder


def test_the_parts_of_two_ranks_are_the_whole(sharded: Path, tmp_path: Path):
    model = tiny("llama")
    with torch.no_grad(), trainfer.capture(model, tmp_path / "plain", side="rollout"):
        model(input_ids=torch.tensor([[7, 8, 9, 10]]))
    plain = weights_by_version(DumpSide(tmp_path / "plain"), name_map())[0]
    found = weights_by_version(DumpSide(sharded), name_map())[0]
    parameters = {name for name, _ in model.named_parameters()}
    assert parameters <= found.keys()
    assert not [name for name in found if "flat" in name]
    for name in parameters:
        assert found[name].fingerprint == plain[name].fingerprint, name
        assert found[name].shape == plain[name].shape, name
    assert trainfer.compare(tmp_path / "plain", sharded).verdict in ("equal", "rounding")
