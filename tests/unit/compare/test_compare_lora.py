"""PEFT's layout against merged weights: effective weights count."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainfer


class Adapted(nn.Module):
    """A linear layer with an adapter, named as PEFT names its parts."""

    def __init__(self, base: nn.Linear, *, alpha: float = 8.0, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": alpha / rank}

    def delta(self) -> Tensor:
        return self.scaling["default"] * self.lora_B["default"].weight @ self.lora_A["default"].weight

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]
        )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.proj = nn.Linear(8, 8, bias=False)
        self.lm_head = nn.Linear(8, 16, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.proj(self.embed_tokens(input_ids))))


def compare(tmp_path: Path, factor: float, *, weights: str = "full", zero: bool = False):
    """Training with an adapter against a rollout whose merged weight holds ``factor`` times of it."""
    torch.manual_seed(0)
    plain = Model()
    adapted, merged = copy.deepcopy(plain), copy.deepcopy(plain)
    layer = adapted.proj = Adapted(adapted.proj)
    with torch.no_grad():
        if zero:
            layer.lora_B["default"].weight.zero_()
        merged.proj.weight += factor * layer.delta()
    for side, model in (("rollout", merged), ("train", adapted)):
        with (
            torch.no_grad(),
            trainfer.capture(model, tmp_path / side, side=side, pass_name="forward", weights=weights),
        ):
            model(input_ids=torch.tensor([[1, 2, 3, 4]]))
    return trainfer.compare(tmp_path / "rollout", tmp_path / "train")


def test_a_merged_adapter_agrees(tmp_path: Path):
    result = compare(tmp_path, 1.0)
    assert result.verdict in ("equal", "rounding"), result.summary()
    assert not result.causes


@pytest.mark.parametrize(
    ("factor", "cause"), [(0.0, "weights.adapter_missing"), (2.0, "weights.adapter_scale")]
)
def test_an_adapter_that_is_missing_or_counted_twice_is_named(tmp_path: Path, factor: float, cause: str):
    result = compare(tmp_path, factor)
    assert (result.first_divergence.stage, result.first_divergence.module) == ("weights", "proj")
    assert result.causes[0].cause == cause


def test_a_missing_adapter_is_named_without_values(tmp_path: Path):
    assert compare(tmp_path, 0.0, weights="fingerprint").causes[0].cause == "weights.adapter_missing"


def test_a_fresh_adapter_changes_nothing(tmp_path: Path):
    result = compare(tmp_path, 0.0, weights="fingerprint", zero=True)
    assert result.verdict in ("equal", "rounding")


def test_without_values_a_merge_is_said_to_be_unproven(tmp_path: Path):
    result = compare(tmp_path, 1.0, weights="fingerprint")
    assert result.verdict == "rounding"
    assert any("proven only" in note for note in result.comparison.coverage.notes)
