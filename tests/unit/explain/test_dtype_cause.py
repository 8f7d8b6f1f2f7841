"""A whole side in another dtype is a cause; the same dtype on both sides, or one module in another, is not this one."""

import copy

import pytest
import torch

import trainfer
from trainfer.integrations.transformers.tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    model = tiny_model("qwen3").eval()
    model.set_attn_implementation("eager")
    return model


def _compare(folder, rollout, train):
    ids = torch.randint(3, 30, (2, 12), generator=torch.Generator().manual_seed(1))
    for side, module in (("rollout", rollout), ("train", train)):
        named = {"pass_name": "old_log_prob"} if side == "train" else {}
        with trainfer.capture(module, folder / side, side=side, weights_version=0, **named) as capture:
            with torch.no_grad():
                logits = module(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()
            values = logits.log_softmax(-1)[:, 5:-1].gather(2, ids[:, 6:, None])[..., 0]
            capture.record_logprobs(
                sequences=ids.tolist(),
                prompt_lengths=[6, 6],
                logprobs=values.tolist(),
                sampling={"temperature": 1.0},
            )
    return trainfer.compare(folder / "rollout", folder / "train")


@pytest.mark.parametrize("coarse", ["rollout", "train"])
def test_a_side_in_bfloat16_beside_float32_is_named(tmp_path, model, coarse):
    half = copy.deepcopy(model).to(torch.bfloat16)
    result = _compare(tmp_path, *((half, model) if coarse == "rollout" else (model, half)))
    assert result.verdict == "rounding"
    (cause,) = result.causes
    assert (cause.cause, cause.stage, cause.confirmed) == ("module.dtype", "modules", True)
    assert cause.module == "model.layers.0.self_attn.q_proj"
    told = "BF16 in the rollout and F32" if coarse == "rollout" else "F32 in the rollout and BF16"
    assert told in cause.evidence[0]


def test_both_sides_in_bfloat16_name_nothing(tmp_path, model):
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert _compare(tmp_path, half, copy.deepcopy(half)).causes == ()


def test_parameters_in_float32_that_compute_in_bfloat16_name_nothing(tmp_path, model):
    """The usual way to train: the dtype of what is computed counts, not that of the weights."""

    class Autocast(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **inputs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(**inputs)

    half = copy.deepcopy(model).to(torch.bfloat16)
    causes = [cause.cause for cause in _compare(tmp_path, half, Autocast(copy.deepcopy(model))).causes]
    assert "module.dtype" not in causes
