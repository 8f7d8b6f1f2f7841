"""A fault shows as introduced error of the module that has it, on the side that has it, and nowhere else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from replay_pairs import beyond, by_name, make_pair, tiny_model
from transformers import PreTrainedModel

import trainfer


def _eps(model: PreTrainedModel) -> str:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-2
    return "model.layers.1.input_layernorm"


def _scaling(model: PreTrainedModel) -> str:
    model.model.layers[0].self_attn.scaling *= 1.02
    return "model.layers.0.self_attn"


def _rope(model: PreTrainedModel) -> str:
    buffer = model.model.rotary_emb.inv_freq
    buffer.copy_(buffer.bfloat16().float())
    return "model.rotary_emb"


def _residual(model: PreTrainedModel) -> str:
    layer = model.model.layers[1]
    layer.register_forward_hook(lambda module, args, output: output + 1e-3 * args[0])
    return "model.layers.1"


def _activation(model: PreTrainedModel) -> str:
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    return "model.layers.0.mlp.act_fn"


def _bfloat16_head(model: PreTrainedModel) -> str:
    head = model.lm_head
    head.register_forward_hook(lambda module, args, output: output.bfloat16().float())
    return "lm_head"


FAULTS = {
    fault.__name__[1:]: fault for fault in (_eps, _scaling, _rope, _residual, _activation, _bfloat16_head)
}


@pytest.mark.parametrize("side", [0, 1], ids=["rollout", "train"])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_faulty_module_introduces_and_no_other(fault: str, side: int, tmp_path: Path) -> None:
    good, bad = tiny_model("qwen3"), tiny_model("qwen3")
    plant: Callable[[PreTrainedModel], str] = FAULTS[fault]
    module = plant(bad)
    sides = (bad, good) if side == 0 else (good, bad)
    pair = make_pair(tmp_path, *sides)
    replay = pair.replay(tiny_model("qwen3"))
    assert beyond(replay) == [module]
    factors = by_name(replay)[module].factors
    assert factors[side] > 10
    assert factors[1 - side] < 1


def test_compare_judges_by_the_replay(tmp_path: Path) -> None:
    good, bad = tiny_model("qwen3"), tiny_model("qwen3")
    module = _scaling(bad)
    pair = make_pair(tmp_path, good, bad)
    result = trainfer.compare(pair.rollout, pair.train, model=good)
    assert result.verdict == "diverged"
    assert result.first_divergence is not None
    assert result.first_divergence.module == module
    found = {m["module"]: m for m in _modules(result)}
    assert found[module]["status"] == "diverged"
    assert found[module]["introduced"] > 100 * found[module]["noise_floor"]
    assert (
        found["model.layers.0.self_attn.q_proj"]["introduced"]
        < found["model.layers.0.self_attn.q_proj"]["noise_floor"]
    )
    assert (
        found["model.layers.0.mlp.gate_proj"]["inherited"]
        > found["model.layers.0.mlp.gate_proj"]["introduced"]
    )


def _modules(result: object) -> list[dict[str, object]]:
    import json

    return json.loads(result.json())["modules"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt2", "mixtral"])
def test_bfloat16_against_float32_is_rounding_everywhere(architecture: str, tmp_path: Path) -> None:
    """Each side is held against the floor of its own dtype: one dtype difference, and not one finding per module."""
    model = tiny_model(architecture)
    coarse = tiny_model(architecture).bfloat16()
    pair = make_pair(tmp_path, coarse, model)
    replay = pair.replay(model)
    assert beyond(replay) == []
    dtypes = {tuple(floor.dtype for floor in module.floors) for module in replay.modules}
    assert ("BF16", "F32") in dtypes
    result = trainfer.compare(pair.rollout, pair.train, model=model)
    assert result.comparison.stage("modules").status.value == "rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gpt2", "gemma2", "mixtral"])
def test_equal_maths_introduces_nothing_beyond_its_floor(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_model(architecture, dtype=dtype)
    other = tiny_model(architecture, dtype=dtype)
    if architecture != "gemma2":
        other.set_attn_implementation("sdpa")
    replay = make_pair(tmp_path, model, other).replay(model)
    assert beyond(replay) == []
