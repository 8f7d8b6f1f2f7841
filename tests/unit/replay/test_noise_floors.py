"""Noise floors are measured: by dtype and size, deterministic, and wide enough for kernels that were not measured."""

from pathlib import Path

import numpy as np
import torch
from replay_pairs import by_name, make_pair, tiny_model

from trainfer.check.replay.floors import SAFETY, UNIT


def test_a_floor_names_what_it_depends_on(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    replay = by_name(make_pair(tmp_path, model).replay(model))
    linear = replay["model.layers.0.mlp.down_proj"].floors[0]
    assert (linear.operator, linear.dtype, linear.width, linear.contraction) == ("linear", "F32", 32, 48)
    assert "the sum in 4 parts" in linear.variants
    assert "one row at a time" in linear.variants
    attention = replay["model.layers.0.self_attn"].floors[0]
    assert (attention.operator, attention.contraction, attention.sequence) == ("attention", 8, 12)
    assert "attention by sdpa" in attention.variants
    norm = replay["model.norm"].floors[0]
    assert (norm.operator, norm.width, norm.contraction) == ("norm", 32, 32)


def test_floors_follow_the_dtype_and_are_the_same_every_time(tmp_path: Path) -> None:
    fine, coarse = tiny_model("llama"), tiny_model("llama", dtype=torch.bfloat16)
    first = by_name(make_pair(tmp_path / "fine", fine).replay(fine))
    second = by_name(make_pair(tmp_path / "coarse", coarse).replay(coarse))
    for name, module in first.items():
        narrow, wide = module.floors[0], second[name].floors[0]
        assert UNIT["F32"] <= narrow.value < 1000 * UNIT["F32"]
        assert UNIT["BF16"] <= wide.value < 100 * UNIT["BF16"]
    again = by_name(make_pair(tmp_path / "again", fine).replay(fine))
    assert {name: m.floors for name, m in first.items()} == {name: m.floors for name, m in again.items()}


def test_a_floor_holds_for_a_product_summed_otherwise(tmp_path: Path) -> None:
    """NumPy's own float32 sums, term by term: slower to converge than any kernel's, and still inside."""
    model = tiny_model("qwen3")
    pair = make_pair(tmp_path, model)
    replay, replayer = by_name(pair.replay(model)), pair.replayer(model)
    name = "model.layers.1.mlp.down_proj"
    executor = replayer.executors[0]
    _, _, _, addresses = replayer._prepare(name)
    rows = executor.input_rows(name, addresses[0]).numpy()
    weight = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    total = np.zeros((len(rows), len(weight)), dtype=np.float32)
    for column in range(rows.shape[1]):
        total += rows[:, column : column + 1] * weight[:, column]
    exact = rows.astype(np.float64) @ weight.astype(np.float64).T
    errors = np.linalg.norm(total - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0 < errors.max() < replay[name].floors[0].value
    assert SAFETY >= 2


def test_a_backend_with_other_maths_is_no_variant(tmp_path: Path) -> None:
    """Gemma-2's cap on scores is left out by sdpa: with it the floor would hide a cap that is missing."""
    model = tiny_model("gemma2")
    model.config.attn_logit_softcapping = 2.0
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 2.0
    replay = by_name(make_pair(tmp_path, model).replay(model))
    floor = replay["model.layers.1.self_attn"].floors[0]
    assert "attention by sdpa" not in floor.variants
    assert floor.value < 1000 * UNIT["F32"]
