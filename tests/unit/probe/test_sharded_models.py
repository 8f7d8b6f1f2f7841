"""FSDP2-wrapped models: bare names, whole rows, fingerprints of parts that add up; ranks share one dump."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny

import trainfer
from trainfer.check.dump.reader import Dump
from trainfer.check.dump.records import Role
from trainfer.check.dump.tensors import load_tensor
from trainfer.check.probe.names import bare_name, named_modules

WORKER = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[4])
from tiny_models import tiny
from torch.distributed.fsdp import fully_shard
import trainfer
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + folder + ".store", rank=rank, world_size=world)
model = tiny("llama")
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
ids = torch.tensor([[7, 8, 9, 10]]) + rank
with trainfer.capture(model, folder, side="train", backward=True):
    model(input_ids=ids, labels=ids).loss.backward()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp") / "dump"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    here = str(Path(__file__).parent)
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(rank), "2", str(folder), here], env=environment)
        for rank in range(2)
    ]
    assert [worker.wait(timeout=240) for worker in workers] == [0, 0]
    return folder


def test_both_ranks_write_one_dump_under_bare_names(sharded: Path, tmp_path: Path):
    dump = Dump(sharded)
    assert dump.ranks == (0, 1)
    assert dump.complete, dump.manifest.incomplete_reasons
    model = tiny("llama")
    for rank in dump.ranks:
        ids = torch.tensor([[7, 8, 9, 10]]) + rank
        with torch.no_grad(), trainfer.capture(model, tmp_path / str(rank), side="train"):
            model(ids)
        plain = Dump(tmp_path / str(rank))
        expected = {
            (t.module, t.name): load_tensor(plain, 0, t) for t in plain.tensors(0) if t.role is Role.OUTPUT
        }
        found = {
            (t.module, t.name): load_tensor(dump, rank, t)
            for t in dump.tensors(rank)
            if t.role is Role.OUTPUT
        }
        assert expected.keys() <= found.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key


def test_fingerprints_of_the_parts_add_up(sharded: Path, tmp_path: Path):
    with torch.no_grad(), trainfer.capture(tiny("llama"), tmp_path / "plain", side="train") as cap:
        cap._model(torch.tensor([[7]]))
    whole = {w.name: w.fingerprint for w in Dump(tmp_path / "plain").weights(0)}
    dump = Dump(sharded)
    parts = [{w.name: w for w in dump.weights(rank)} for rank in dump.ranks]
    assert parts[0].keys() == whole.keys()
    for name, text in whole.items():
        if not parts[0][name].parts:
            assert parts[0][name].fingerprint == text
            continue
        pieces = [part[name].fingerprint.split(":") for part in parts]
        words = [sum(int(piece[2][at : at + 16], 16) for piece in pieces) % 2**64 for at in (0, 16)]
        count = sum(int(piece[1]) for piece in pieces)
        assert f"{pieces[0][0]}:{count}:{words[0]:016x}{words[1]:016x}" == text, name


def test_gradients_of_sharded_parameters_are_there_with_their_parts(sharded: Path):
    dump = Dump(sharded)
    gradients = [t for t in dump.tensors(1) if t.role is Role.PARAMETER_GRADIENT]
    assert {f"{t.module}.{t.name}" for t in gradients} == {
        name for name, _ in tiny("llama").named_parameters()
    }
    assert {t.parts for t in gradients} == {((0, 1, 2),)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_names_see_through_wrappers():
    assert bare_name("_orig_mod.model.layers.0._fsdp_wrapped_module.mlp") == "model.layers.0.mlp"
    model = tiny("llama")
    expected = list(named_modules(model))
    wrapped = torch.nn.Module()
    wrapped.module = model
    assert list(named_modules(wrapped)) == expected
    adapter, base = torch.nn.Module(), torch.nn.Module()
    adapter.base_model, base.model = base, model
    assert list(named_modules(adapter)) == expected
    assert list(named_modules(torch.compile(model))) == expected
