"""Sketches, statistics and functions compare too, each as far as it can."""

import copy
from pathlib import Path

import pytest
import torch
from compare_models import forward, make

import trainfer

SEQUENCES = [[5, 6, 7, 8, 9, 30, 31], [10, 11, 12, 40, 41]]
FAULT = "model.layers.1.mlp"


def compare(folder: Path, *, faulty: bool, layout: str, **options):
    model = make("qwen3")
    other = copy.deepcopy(model)
    if faulty:
        other.get_submodule(FAULT).register_forward_hook(lambda module, args, out: out * 1.05)
    for side, chosen, shape in (("rollout", model, "packed"), ("train", other, layout)):
        with (
            torch.no_grad(),
            trainfer.capture(chosen, folder / side, side=side, pass_name="prefill", **options),
        ):
            forward(chosen, SEQUENCES, shape)
    return trainfer.compare(folder / "rollout", folder / "train")


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("layout", ["packed", "right"])
def test_sketches_agree_and_find_a_fault_without_values(tmp_path: Path, level: str, layout: str):
    clean = compare(tmp_path / "clean", faulty=False, layout=layout, task="sketch", level=level)
    assert clean.verdict in ("equal", "rounding"), clean.summary()
    faulty = compare(tmp_path / "faulty", faulty=True, layout=layout, task="sketch", level=level)
    assert faulty.first_divergence.module == ("model.layers.1" if level == "L1" else FAULT)
    assert len(faulty.first_divergence.tokens) == 12


def test_statistics_are_compared_where_calls_hold_the_same_rows(tmp_path: Path):
    assert compare(tmp_path / "clean", faulty=False, layout="packed", task="statistics").verdict == "equal"
    faulty = compare(tmp_path / "faulty", faulty=True, layout="packed", task="statistics")
    assert faulty.first_divergence.module == FAULT


def test_statistics_of_other_rows_are_not_compared_and_not_passed(tmp_path: Path):
    result = compare(tmp_path, faulty=False, layout="right", task="statistics")
    assert result.verdict == "incomparable"
    assert any("different rows" in text for text in result.comparison.coverage.modules_unmatched)


def test_gradients_of_equal_passes_agree_and_a_fault_shows_behind_the_forward(tmp_path: Path):
    model = make("qwen3")
    ids = torch.tensor([SEQUENCES[0]])
    for side in ("rollout", "train"):
        with trainfer.capture(model, tmp_path / side, side=side, pass_name="update", backward=True):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
    result = trainfer.compare(tmp_path / "rollout", tmp_path / "train")
    assert result.verdict == "equal", result.summary()
    labels = {module.module for module in result.comparison.modules}
    assert f"{FAULT} (backward)" in labels
    assert "lm_head (parameters)" in labels
