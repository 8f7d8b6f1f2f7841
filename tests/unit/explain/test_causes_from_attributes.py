"""Without a model: what both sides say of a module, and which rows are off, name a cause that is never confirmed."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import trainfer

IDS = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23, 24]]


def make_model():
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=24, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() >= 2 else 1.0)
    return model


@torch.no_grad()
def compare(tmp_path: Path, change, both=lambda model: None):
    good, bad = make_model(), make_model()
    for model in (good, bad):
        both(model)
    change(bad)
    for side, model in (("rollout", good), ("train", bad)):
        with trainfer.capture(model, tmp_path / side, side=side, pass_name="forward"):
            for ids in IDS:
                model(input_ids=torch.tensor([ids]), use_cache=False)
    return trainfer.compare(tmp_path / "rollout", tmp_path / "train")


def eps(model):
    model.model.norm.variance_epsilon = 1e-3


def factor(model):
    model.model.rotary_emb.attention_scaling = 1.1


def dropout(model):
    attention = model.model.layers[0].self_attn
    attention.attention_dropout = 0.2
    attention.train()


def scale(model):
    model.model.layers[0].self_attn.scaling = 0.5


def shifted(model):
    def later(m, args, kwargs):
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": kwargs["position_ids"] + 2}
        return (args[0], args[1] + 2), kwargs

    model.model.rotary_emb.register_forward_pre_hook(later, with_kwargs=True)


@pytest.mark.parametrize(
    ("change", "cause", "word"),
    [
        (eps, "norm.eps", "variance_epsilon is 1e-06 in the rollout and 0.001 in training"),
        (factor, "rope.scaling", "attention_scaling"),
        (dropout, "mode.dropout", "training is False in the rollout and True in training"),
        (scale, "attention.scale", "scaling is 0.353553 in the rollout and 0.5"),
        (shifted, "rope.positions", "other positions"),
    ],
)
def test_an_attribute_that_decides_the_maths_names_the_cause(tmp_path: Path, change, cause: str, word: str):
    found = compare(tmp_path, change).causes[0]
    assert (found.cause, found.confirmed) == (cause, False)
    assert any(word in line for line in found.evidence), found.evidence


PROJECTION = "model.layers.0.self_attn.q_proj"


def adapt(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.5, target_modules=["q_proj"])
    peft.inject_adapter_in_model(config, model)
    layer = model.get_submodule(PROJECTION)
    for part in (layer.lora_A, layer.lora_B):
        torch.nn.init.normal_(part["default"].weight, generator=torch.Generator().manual_seed(1))
    model.eval()


def other_scaling(model):
    model.get_submodule(PROJECTION).scaling["default"] = 1.0


def switched_off(model):
    model.get_submodule(PROJECTION).enable_adapters(enabled=False)


def dropped(model):
    model.get_submodule(PROJECTION).train()


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (other_scaling, "weights.adapter_scale"),
        (switched_off, "weights.adapter_missing"),
        (dropped, "mode.dropout"),
    ],
)
def test_an_adapter_that_both_sides_have(tmp_path: Path, change, cause: str):
    found = compare(tmp_path, change, both=adapt).causes[0]
    assert (found.cause, found.confirmed) == (cause, False)
    assert found.module.startswith(PROJECTION)


def test_a_projection_far_off_with_a_proven_weight_computes_with_a_copy(tmp_path: Path):
    def plant(model):
        layer = model.get_submodule(PROJECTION)
        other = layer.weight.detach() * 1.3
        layer.register_forward_hook(lambda m, a, out: a[0] @ other.T)

    found = compare(tmp_path, plant).causes[0]
    assert (found.cause, found.module, found.confirmed) == ("weights.cached_copy", PROJECTION, False)


def test_a_module_that_says_nothing_stays_unknown(tmp_path: Path):
    def plant(model):
        model.model.layers[0].mlp.act_fn.register_forward_hook(lambda m, a, out: out * 1.01)

    found = compare(tmp_path, plant).causes[0]
    assert (found.cause, found.module) == ("module.unknown", "model.layers.0.mlp.act_fn")


def test_equal_sides_have_no_cause_and_nothing_to_repair(tmp_path: Path):
    found = compare(tmp_path, lambda model: copy.copy(model))
    assert found.verdict == "equal"
    assert found.causes == ()
    assert found.document().repairs == ()
