"""Exact mode is promised only where it was measured, and refused by the name of what breaks it."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, MixtralConfig

from trainfer.exact import attention, calibration
from trainfer.exact.attention import ATTENTION_NAME
from trainfer.exact.calibration import calibrate
from trainfer.exact.calibration_store import calibration_of
from trainfer.exact.linear import RoutedLinear, route_linears
from trainfer.exact.rules import MEASURED, ORDINARY, KeyLengths, key_lengths
from trainfer.integrations.transformers.load import tiny_model
from trainfer.integrations.transformers.register import register_attention

SIZES = {"vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}  # fmt: skip


class SplitLinear(RoutedLinear):
    """Sums the halves of the inner axis apart where rows are few, as a split-K kernel does."""

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() // input.shape[-1] > 32:
            return F.linear(input, self.weight, self.bias)
        half = input.shape[-1] // 2
        return F.linear(input[..., :half], self.weight[:, :half]) + F.linear(
            input[..., half:], self.weight[:, half:], self.bias
        )


def other_model(config) -> nn.Module:
    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    route_linears(model)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_plain_decoders_pass(architecture, dtype, bitwise):
    found = calibrate(tiny_model(architecture, dtype=dtype))
    assert found.problems == () or not bitwise
    assert found.safe_key_lengths[-1] == 512


def test_calibration_leaves_rules_random_state_and_model_as_they_were():
    model = tiny_model("qwen3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, rules = torch.get_rng_state(), key_lengths()
    calibrate(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert key_lengths() == rules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_split_k_linear_is_named():
    model = tiny_model("qwen2")
    model.get_submodule("model.layers.1.mlp.down_proj").__class__ = SplitLinear
    found = calibrate(model)
    assert not found.is_exact
    assert [problem.operator for problem in found.problems] == [
        "model.layers.1.mlp.down_proj (linear 192 -> 64, float32)"
    ]
    assert "8 rows differ" in found.problems[0].detail


def plant(monkeypatch, kernel) -> None:
    monkeypatch.setattr(attention, "masked_attention", kernel)
    monkeypatch.setattr(calibration, "masked_attention", kernel)


def test_an_attention_that_depends_on_padding_is_named(monkeypatch):
    stock = attention.masked_attention

    def leaking(query, key, value, form, mask):
        """Masked keys keep a weight of about 1e-6 in all."""
        if mask is not None:
            mask = mask.clamp(min=-14.0)
        return stock(query, key, value, form, mask)

    plant(monkeypatch, leaking)
    found = calibrate(tiny_model("qwen2"))
    assert [problem.operator for problem in found.problems] == [
        "attention (scaled_dot_product_attention, 4/2 heads of 16, float32)"
    ]
    assert "differs between decode" in found.problems[0].detail


def test_an_attention_that_is_exact_at_whole_blocks_is_padded_to_them(monkeypatch):
    stock = attention.masked_attention

    def other_order(query, key, value, form, mask):
        """Sums the keys backwards unless there are whole blocks of them."""
        if mask is None or key.shape[2] % 512 == 0:
            return stock(query, key, value, form, mask)
        order = torch.arange(key.shape[2]).flip(0)
        return stock(query, key[:, :, order], value[:, :, order], form, mask[..., order])

    plant(monkeypatch, other_order)
    found = calibrate(tiny_model("qwen2"))
    assert found.safe_key_lengths == (512,)
    assert found.is_exact


class Centred(nn.Module):
    """Mixes rows."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows - 1e-3 * rows.mean(dim=1, keepdim=True)


def test_a_module_that_mixes_rows_is_named_by_the_trial():
    model = tiny_model("llama")
    model.get_submodule("model.layers.1").input_layernorm = Centred()
    found = calibrate(model)
    assert [problem.operator for problem in found.problems] == ["model.layers.1.input_layernorm (Centred)"]


def test_an_activation_that_depends_on_other_rows_is_named():
    model = tiny_model("llama")
    model.get_submodule("model.layers.0.mlp").act_fn = Centred()
    found = calibrate(model)
    assert [problem.operator for problem in found.problems] == [
        "model.layers.0.mlp.act_fn (Centred of 64, float32)"
    ]


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, sliding_window=24),
        Gemma2Config(**SIZES, sliding_window=24),
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=["sliding-window", "soft-cap", "experts"],
)
def test_other_models_are_proved_or_refused_by_name(config, bitwise):
    found = calibrate(other_model(config))
    for problem in found.problems:
        assert problem.operator
        assert problem.detail


def test_key_lengths_follow_from_what_was_found_safe():
    assert MEASURED.cuts == (192, 384, 512)
    assert ORDINARY.cuts == (512,)
    few = KeyLengths(safe=(16, 32, 512))
    assert few.cuts == (32, 512)
    assert [few.padded(length) for length in (1, 16, 33, 512, 513, 560)] == [16, 16, 512, 512, 528, 1024]
    assert KeyLengths(safe=(512,)).cuts == (512,)


def test_a_calibration_is_read_back_and_anything_else_is_measured_anew(tmp_path: Path):
    model = tiny_model("qwen2")
    first = calibration_of(model, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert tuple(record["safe_key_lengths"]) == first.safe_key_lengths
    record["problems"] = [{"operator": "written by hand", "detail": "to see that the file is read"}]
    file.write_text(json.dumps(record))
    assert str(calibration_of(model, folder=tmp_path).problems[0]).startswith("written by hand")
    for damaged in (
        "",
        "[]",
        "{}",
        '{"safe_key_lengths": [3], "problems": [], "decode_rows": 8}',
        '{"safe_key_lengths": [], "problems": [], "decode_rows": 8}',
        '{"safe_key_lengths": [16, 512], "problems": [], "decode_rows": 3}',
        '{"safe_key_lengths": [16, 512], "problems": []}',
    ):
        file.write_text(damaged)
        assert calibration_of(model, folder=tmp_path) == first


def test_another_machine_model_or_number_of_threads_is_another_calibration(tmp_path: Path, monkeypatch):
    calibration_of(tiny_model("qwen2"), folder=tmp_path)
    calibration_of(tiny_model("qwen2", hidden_size=32), folder=tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    calibration_of(tiny_model("qwen2"), folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_an_unwritable_cache_is_no_obstacle(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert calibration_of(tiny_model("qwen2"), folder=tmp_path / "file").safe_key_lengths[-1] == 512
