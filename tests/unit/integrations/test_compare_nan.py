"""A NaN in one row: the module that made it is named, also where a model is at hand to replay."""

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import trainfer

PLACE = "model.layers.0.mlp.down_proj"


def model_with(*, nan: bool):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, initializer_range=0.15, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    module = model.get_submodule(PLACE)
    plain = module.forward

    def spoiled(x):
        out = plain(x).clone()
        out[0, 60, 3] = math.nan
        return out

    if nan:
        module.forward = spoiled
    return model


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_a_nan_is_found_where_it_was_made(tmp_path, side):
    ids = torch.arange(80)[None] % 63 + 1
    for name in ("rollout", "train"):
        model = model_with(nan=name == side)
        with trainfer.capture(model, tmp_path / name, side=name), torch.no_grad():
            model(input_ids=ids)
    for reference in (None, model_with(nan=False)):
        result = trainfer.compare(tmp_path / "rollout", tmp_path / "train", model=reference)
        assert result.verdict == "diverged"
        assert result.first_divergence.module == PLACE
        assert result.first_divergence.tokens == ((0, 60),)
