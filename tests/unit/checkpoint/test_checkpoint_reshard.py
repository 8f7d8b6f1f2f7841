"""FSDP2 over gloo: what R ranks wrote, any number of ranks reads, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trainfer.train.update.checkpoint import load_training_state, save_training_state

action, folder, rank, ranks, store = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
if ranks > 1:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)                     # 7 rows: uneven on 2 and on 3 ranks
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.ones(1))            # empty shard on all ranks but one
        self.low = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.arange(4))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() * self.scale + self.low.float().sum()

torch.manual_seed(0 if action == "save" else 1)
model = Model()
if ranks > 1:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params={model.low})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

def full(value):
    return value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value

def bits():
    tensors = {name: full(value).clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = full(value).clone()
    return tensors

if action == "save":
    for step in range(3):
        model(torch.arange(7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_training_state(folder / "actor", model, optimizer, {"weights_version": 3})
    expected = bits()
    if rank == 0:
        from safetensors.torch import save_file
        save_file({name: value.contiguous() for name, value in expected.items()}, folder / "expected.safetensors")
else:
    state = load_training_state(folder / "actor", model, optimizer)
    assert state.counters == {"weights_version": 3}
    from safetensors.torch import load_file
    expected, found = load_file(folder / "expected.safetensors"), bits()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert value.dtype == found[name].dtype and torch.equal(value, found[name]), name
    print(f"restored={state.rng_restored}", flush=True)
if ranks > 1:
    dist.barrier()
os._exit(0)  # torch's gloo threads now and then abort a process that ends in the ordinary way
"""


def start(action: str, folder: Path, ranks: int) -> list[str]:
    store = folder / f"store-{action}-{ranks}"
    store.unlink(missing_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, action, str(folder), str(rank), str(ranks), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, results[0][1][-2000:]
    return [output.strip() for output, _ in results]


@pytest.mark.parametrize(
    ("ranks", "readers"), [(2, (3, 1)), pytest.param(1, (2,), marks=pytest.mark.slow)], ids=["2-3-1", "1-2"]
)
def test_what_some_ranks_wrote_others_read_bit_for_bit(tmp_path, ranks, readers):
    start("save", tmp_path, ranks)
    shards = sorted((tmp_path / "actor").glob("*.safetensors"))
    assert len(shards) == ranks
    for count in readers:
        assert start("load", tmp_path, count) == [f"restored={rank < ranks}" for rank in range(count)]
    if ranks == 2:
        shards[-1].unlink()
        with pytest.raises(AssertionError, match="CheckpointError"):  # noticed before anything is loaded
            start("load", tmp_path, 1)
