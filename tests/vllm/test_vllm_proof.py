"""The proof names what vLLM does not compute with: planted on the side of vLLM, after the weights arrived."""

import copy

import pytest
import torch
from vllm_cases import disturb, folder_of, gaps, peaked_model, reload, requests, start

from trainfer.errors import EngineError, WeightSyncError
from trainfer.types import SamplingParams
from trainfer.workers.rollout import RolloutWorker
from trainfer.workers.weights import sent_tensors, sync_weights

CASES = ["qwen3", "qwen3 tied", "gpt2", "qwen2 bf16"]


@pytest.fixture(scope="module", params=CASES)
def served(request, tmp_path_factory):
    name, _, variant = request.param.partition(" ")
    dtype = torch.bfloat16 if variant == "bf16" else torch.float32
    folder = folder_of(peaked_model(name, tied=variant == "tied", dtype=dtype), tmp_path_factory.mktemp(name))
    engine = start(folder, dtype=str(dtype).removeprefix("torch."), bucket_bytes=1)
    yield request.param, folder, dtype, engine
    engine.close()


def vllm_model(engine):
    return engine._llm.apply_model(lambda model: model)[0]


def sync(model, engine, dtype, version=1):
    return sync_weights(model, RolloutWorker(engine), version=version, dtype=dtype)


class Tampered:
    """An engine in which something happens after the weights arrived."""

    def __init__(self, engine, tamper):
        self._engine, self._tamper = engine, tamper

    def load_weights(self, named_tensors, *, version):
        self._engine.load_weights(named_tensors, version=version)
        self._tamper(vllm_model(self._engine))

    def weight_fingerprints(self):
        return self._engine.weight_fingerprints()


def assert_named(served, model, tamper, *names):
    _, _, dtype, engine = served
    with pytest.raises(WeightSyncError) as error:
        sync_weights(model, RolloutWorker(Tampered(engine, tamper)), version=9, dtype=dtype)
    for name in names:
        assert name in str(error.value)
    assert f"{len(names)} of" in str(error.value)


def test_layer_by_layer_every_tensor_arrives_and_is_proven(served):
    name, folder, dtype, engine = served
    model = reload(folder, dtype)
    disturb(model, seed=3)
    proof = sync(model, engine, dtype, version=5)
    assert proof.matches
    assert proof.tensors == len(dict(sent_tensors(model, dtype)))
    assert engine.weights_version == 5
    asked = requests(6, 3, SamplingParams(max_new_tokens=40))
    difference = gaps(model, asked, engine.generate(asked))
    if dtype == torch.float32:
        assert difference.max() <= 2e-5
    else:
        print(f"{name}: |dlogp| mean {difference.mean():.4f}, max {difference.max():.4f}")
        assert 1e-4 < difference.mean() < 0.1


def test_a_layer_that_kept_its_old_packed_weight_is_named(served):
    name, folder, dtype, engine = served
    model = reload(folder, dtype)
    sync(model, engine, dtype)
    path = "transformer.h.1.mlp.c_proj" if name == "gpt2" else "model.layers.1.mlp.down_proj"
    old = vllm_model(engine).get_submodule(path).cpu_linear
    disturb(model, seed=4)

    def keep(inside):
        inside.get_submodule(path).cpu_linear = old

    assert_named(served, model, keep, f"{path}.weight")


def test_a_head_whose_parameter_is_new_but_whose_packed_copy_is_old_is_named(served):
    _, folder, dtype, engine = served
    model = reload(folder, dtype)
    sync(model, engine, dtype)
    old = vllm_model(engine).lm_head.cpu_linear
    disturb(model, seed=5)

    def keep(inside):
        inside.lm_head.cpu_linear = old
        rows = inside.lm_head.weight[: model.config.vocab_size]
        assert torch.equal(rows, model.get_output_embeddings().weight)

    assert_named(served, model, keep, "lm_head.weight")


def test_a_head_cut_off_from_its_embedding_is_named(served):
    name, folder, dtype, engine = served
    if name not in ("qwen3 tied", "gpt2"):
        pytest.skip("the head is not tied")
    model = reload(folder, dtype)
    sync(model, engine, dtype)
    inside = vllm_model(engine)
    whole = inside.lm_head
    other = copy.copy(whole)
    other._parameters = {"weight": torch.nn.Parameter(whole.weight.clone(), requires_grad=False)}
    other.quant_method.process_weights_after_loading(other)
    disturb(model, seed=6)

    def cut(model_inside):
        model_inside.lm_head = other

    try:
        assert_named(served, model, cut, "lm_head.weight")
    finally:
        inside.lm_head = whole


def test_one_changed_bit_of_a_norm_is_named(served):
    name, folder, dtype, _ = served
    model = reload(folder, dtype)
    path = "transformer.ln_f" if name == "gpt2" else "model.norm"

    def flip(inside):
        bits = inside.get_submodule(path).weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits[3] ^= 1

    assert_named(served, model, flip, f"{path}.weight")


def test_a_table_of_angles_with_another_base_is_named(served):
    name, folder, dtype, engine = served
    if name == "gpt2":
        pytest.skip("it has no rotary embedding")
    model = reload(folder, dtype)
    table = vllm_model(engine).model.layers[0].self_attn.rotary_emb.cos_sin_cache
    good = table.clone()

    def turn(_):
        angles = torch.outer(torch.arange(len(table)), model.model.rotary_emb.inv_freq * 1.01)
        table.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1))

    try:
        assert_named(served, model, turn, "rotary_emb.inv_freq", "rotary_emb.original_inv_freq")
    finally:
        table.copy_(good)


def test_a_swapped_pair_of_fused_weights_is_named(served):
    name, folder, dtype, _ = served
    if name == "gpt2":
        pytest.skip("gate and up do not exist")
    model = reload(folder, dtype)
    prefix = "model.layers.0.mlp"

    def swap(inside):
        fused = inside.get_submodule(f"{prefix}.gate_up_proj")
        weight = torch.cat([model.get_parameter(f"{prefix}.{part}_proj.weight") for part in ("up", "gate")])
        fused.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    assert_named(served, model, swap, f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")


def test_negative_zeros_and_the_smallest_numbers_arrive_too(served):
    name, folder, dtype, engine = served
    model = reload(folder, dtype)
    path = "transformer.h.0.attn.c_proj" if name == "gpt2" else "model.layers.0.self_attn.o_proj"
    with torch.no_grad():
        weight = model.get_submodule(path).weight
        weight[0, :2] = torch.tensor([-0.0, 1e-39])
        model.get_input_embeddings().weight[5, :2] = torch.tensor([-0.0, -1e-39])
    assert sync(model, engine, dtype).matches


def test_missing_unknown_and_misshapen_weights_are_refused_and_stop_the_engine(served):
    _, folder, dtype, engine = served
    model = reload(folder, dtype)
    whole = dict(sent_tensors(model, dtype))
    name = next(name for name in whole if "layers.1" in name or ".h.1." in name)
    for change, message in (
        ({k: v for k, v in whole.items() if k != name}, "weights are missing"),
        ({**whole, "model.layers.0.adapter.lora_A.weight": whole[name]}, "has no place in vLLM's model"),
        ({**whole, name: whole[name][:-1]}, "has shape"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            engine.load_weights(change.items(), version=3)
        with pytest.raises(EngineError, match="partial set of weights"):
            engine.generate(requests(1, 1, SamplingParams(max_new_tokens=2)))
    engine.load_weights(whole.items(), version=4)
    assert engine.generate(requests(1, 1, SamplingParams(max_new_tokens=2)))
