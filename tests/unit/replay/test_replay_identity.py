"""The decomposition is exact, and a model that runs in float64 introduces nothing anywhere."""

from pathlib import Path

import pytest
import torch
from replay_pairs import CONFIGS, by_name, make_pair, tiny_model, worst

from trainfer.check.replay.rows import MissingRowsError
from trainfer.check.replay.wide import Wide

NOT_ROWS = "act_fn"
"""Mixtral's experts call their activation on the rows of one expert: nobody knows which those are."""


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_float64_sides_introduce_nothing_in_any_module(architecture: str, tmp_path: Path) -> None:
    """Both sides run the real model wholly in float64, one with a cache and step by step. Whatever the replay gets
    wrong (a mask, a window, a key of another sequence, a cast) is an introduced error far above 1e-9."""
    model = tiny_model(architecture, dtype=torch.float64)
    pair = make_pair(tmp_path, model, inside=Wide)
    replay = pair.replay(model)
    missed = {name: why for name, why in replay.not_replayed.items() if not name.endswith(NOT_ROWS)}
    assert missed == {}
    assert len(replay.modules) >= 25
    assert max(worst(module) for module in replay.modules) < 1e-9
    assert max(module.inherited.max() for module in replay.modules) < 1e-9


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_the_difference_is_what_is_introduced_and_inherited(
    architecture: str, seed: int, tmp_path: Path
) -> None:
    """y(train) − y(rollout) = introduced(train) − introduced(rollout) + inherited, as vectors, with weights that differ
    on the two sides so that no term is zero."""
    model = tiny_model(architecture, seed=seed)
    other = tiny_model(architecture, seed=seed)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.mul_(1.0 + 1e-3)
    pair = make_pair(tmp_path, model, other, seed=seed)
    replayer = pair.replayer(model)
    checked = 0
    for name in replayer.reference.modules:
        try:
            blocks = list(replayer.blocks(name))
        except MissingRowsError:
            continue
        for terms in (item for block in blocks for item in block.values()):
            made = terms.introduced(1) - terms.introduced(0) + terms.inherited
            scale = max(1.0, float(terms.exact[0].abs().max()))
            assert float((terms.difference - made).abs().max()) <= 1e-9 * scale
            checked += len(made)
    assert checked > 300


def test_inherited_error_is_that_of_the_input(tmp_path: Path) -> None:
    """Behind a module that is off, a linear layer's inherited error is W times its input's difference, by hand."""
    model = tiny_model("qwen3")
    other = tiny_model("qwen3")
    other.model.layers[0].post_attention_layernorm.variance_epsilon = 1e-2
    pair = make_pair(tmp_path, model, other)
    replay = by_name(pair.replay(model))
    replayer = pair.replayer(model)
    gate = model.model.layers[0].mlp.gate_proj
    norm = next(iter(replayer.blocks("model.layers.0.post_attention_layernorm")))["output"]
    terms = next(iter(replayer.blocks("model.layers.0.mlp.gate_proj")))["output"]
    by_hand = norm.difference @ gate.weight.double().T
    assert torch.allclose(terms.inherited, by_hand, atol=1e-9)
    found = replay["model.layers.0.mlp.gate_proj"]
    assert found.inherited.max() > 1e-3
    assert max(found.factors) < 1
    assert max(replay["model.layers.0.post_attention_layernorm"].factors) > 100
