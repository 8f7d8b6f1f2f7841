"""Masters in float32 that FSDP2 computes with in bfloat16, against an engine in bfloat16: what is used is compared."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import trainfer
from trainfer.check.probe.weights import computed_formats
from trainfer.integrations.transformers.load import load_model, save_model, tiny_model

IDS = torch.tensor([[7, 8, 9, 10, 11]])
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model, policy=BF16):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@pytest.fixture
def masters(tmp_path):
    save_model(
        tiny_model("qwen3", hidden_size=32, intermediate_size=64, dtype=torch.float32), tmp_path / "model"
    )
    return load_model(tmp_path / "model", dtype=torch.float32, device="cpu", attention="eager")


def captured(model, folder, side):
    with torch.no_grad(), trainfer.capture(model, folder, side=side):
        model(input_ids=IDS)


def weights_stage(masters, tmp_path, change=0.0):
    engine = load_model(tmp_path / "model", dtype=torch.bfloat16, device="cpu", attention="eager")
    captured(engine, tmp_path / "rollout", "rollout")
    with torch.no_grad():
        masters.model.layers[1].mlp.up_proj.weight[3, 4] += change
    captured(sharded(masters), tmp_path / "train", "train")
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    result.write(tmp_path / "report")
    told = json.loads((tmp_path / "report" / "result.json").read_text())
    return next(stage for stage in told["stages"] if stage["name"] == "weights"), result


def test_masters_that_round_to_the_engines_weights_are_equal(one_rank, masters, tmp_path):
    stage, _ = weights_stage(masters, tmp_path)
    assert stage["status"] == "equal", stage


def test_a_master_that_rounds_to_another_weight_is_named(one_rank, masters, tmp_path):
    stage, result = weights_stage(masters, tmp_path, change=0.5)
    assert stage["status"] == "diverged"
    assert "up_proj" in result.first_divergence.module


def test_each_group_of_layers_has_its_own_policy(one_rank, masters):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(masters.model.layers[0], mesh=mesh, mp_policy=MixedPrecisionPolicy())
    fully_shard(masters, mesh=mesh, mp_policy=BF16)
    formats = computed_formats(masters)
    names = {name: formats.get(id(p)) for name, p in masters.named_parameters()}
    assert names["model.layers.1.mlp.up_proj.weight"] == torch.bfloat16
    assert names["model.layers.0.mlp.up_proj.weight"] is None
    assert names["model.norm.weight"] == torch.bfloat16
