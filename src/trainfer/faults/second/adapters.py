"""Faults of LoRA adapters, made with PEFT itself: not merged, switched off, scaled otherwise, merged on a coarse grid.

Takes a pair; the trainer computes with adapters, the rollout with merged weights or with adapters of its own. PEFT is an
extra; without it these faults say so.
"""

import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainfer.errors import ConfigError
from trainfer.faults.fault import Fault
from trainfer.faults.models import LAYERS, layer_name, module_of
from trainfer.faults.pair import Pair
from trainfer.faults.records import Expected

RANK = 4
SCALING = 2.0
ADAPTER = "default"
CYCLES = 4
Delta = dict[str, tuple[Tensor, Tensor]]
"""Module -> A ``[rank, in]`` and B ``[out, rank]``."""


def targets(pair: Pair) -> list[str]:
    """Query and value projections of every layer."""
    return [
        f"{layer_name(pair.clean, layer)}.self_attn.{part}"
        for layer in range(LAYERS)
        for part in ("q_proj", "v_proj")
    ]


def draw_deltas(pair: Pair, names: Sequence[str]) -> Delta:
    """Adapters that matter: their product is of the weights' own size times about 0.3."""
    draw = pair.random()
    made: Delta = {}
    for name in names:
        weight = module_of(pair.clean, name).weight
        size = float(weight.detach().float().std())
        first = torch.randn(RANK, weight.shape[1], generator=draw)
        second = torch.randn(weight.shape[0], RANK, generator=draw) * size * 0.15 / RANK**0.5
        made[name] = (first.to(weight.dtype), second.to(weight.dtype))
    return made


def wrap(model: PreTrainedModel, deltas: Delta, *, dropout: float = 0.0) -> PreTrainedModel:
    """Put PEFT's layers into a model."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError("these faults are made with PEFT: pip install 'trainfer[lora]'") from error
    config = peft.LoraConfig(
        r=RANK, lora_alpha=int(SCALING * RANK), target_modules=list(deltas), lora_dropout=dropout, bias="none"
    )
    peft.inject_adapter_in_model(config, model)
    for name, (first, second) in deltas.items():
        layer = module_of(model, name)
        layer.lora_A[ADAPTER].weight.data = first.clone()
        layer.lora_B[ADAPTER].weight.data = second.clone()
    return model.eval()


def merge(model: PreTrainedModel, deltas: Delta, scaling: Callable[[str], float] = lambda _: SCALING) -> None:
    """Add adapters to the weights, each times its scaling."""
    for name, (first, second) in deltas.items():
        weight = module_of(model, name).weight
        with torch.no_grad():
            weight.copy_(weight.float() + scaling(name) * second.float() @ first.float())


def _merged_against_adapter(
    pair: Pair, names: Sequence[str], scaling: Callable[[str], float], *, dropout: float = 0.0
) -> None:
    deltas = draw_deltas(pair, names)
    wrap(pair.train_model, deltas, dropout=dropout)
    merge(pair.rollout_model, deltas, scaling)
    merge(pair.clean, deltas)


def plant_one_layer(pair: Pair) -> list[Expected]:
    """The pattern of names that the engine merges leaves out one layer."""
    lost = layer_name(pair.clean, pair.case.layer)
    _merged_against_adapter(pair, targets(pair), lambda name: 0.0 if name.startswith(lost) else SCALING)
    return [Expected(cause="weights.adapter_missing", modules=(f"{lost}.self_attn.q_proj",))]


def plant_switched_off(pair: Pair) -> list[Expected]:
    """The request names no adapter: the engine has it, and computes without."""
    deltas = draw_deltas(pair, targets(pair))
    for model in (pair.train_model, pair.rollout_model):
        wrap(model, deltas)
    for name in deltas:
        layer = module_of(pair.rollout_model, name)
        layer.enable_adapters(enabled=False)
    merge(pair.clean, deltas)
    return [Expected(cause="weights.adapter_missing", modules=("model.layers.0.self_attn.q_proj",))]


def plant_alpha_ignored(pair: Pair) -> list[Expected]:
    """The engine's adapter has scaling 1 in place of alpha over rank."""
    deltas = draw_deltas(pair, targets(pair))
    for model in (pair.train_model, pair.rollout_model):
        wrap(model, deltas)
    for name in deltas:
        layer = module_of(pair.rollout_model, name)
        layer.scaling[ADAPTER] = 1.0
    merge(pair.clean, deltas)
    return [Expected(cause="weights.adapter_scale", modules=("model.layers.0.self_attn.q_proj",))]


def plant_root_of_rank(pair: Pair) -> list[Expected]:
    """The engine divides alpha by the root of the rank."""
    _merged_against_adapter(pair, targets(pair), lambda _: SCALING * RANK**0.5)
    return [Expected(cause="weights.adapter_scale", modules=("model.layers.0.self_attn.q_proj",))]


def plant_head_left_out(pair: Pair) -> list[Expected]:
    """The engine merges the layers' adapters and not the head's."""
    _merged_against_adapter(
        pair, [*targets(pair), "lm_head"], lambda name: 0.0 if name == "lm_head" else SCALING
    )
    return [Expected(cause="head.adapter", accepted=("weights.adapter_missing",), modules=("lm_head",))]


def plant_cycles(pair: Pair) -> list[Expected]:
    """Adapters are merged and taken out again at every sync, on a bfloat16 grid."""
    deltas = draw_deltas(pair, targets(pair))
    wrap(pair.train_model, deltas)
    merge(pair.clean, deltas)
    for name, (first, second) in deltas.items():
        weight = module_of(pair.rollout_model, name).weight
        delta = SCALING * second.float() @ first.float()
        held = weight.detach().float()
        for _ in range(CYCLES):
            held = ((held + delta).bfloat16().float() - delta).bfloat16().float()
        weight.data = (held + delta).bfloat16().to(weight.dtype)
    return [Expected(cause="weights.rounded_merge", modules=("model.layers.0.self_attn.q_proj",))]


def plant_dropout(pair: Pair) -> list[Expected]:
    """The trainer is in training mode: its adapters drop inputs."""
    _merged_against_adapter(pair, targets(pair), lambda _: SCALING, dropout=pair.size)
    pair.train_model.train()
    first = "model.layers.0.self_attn.q_proj"
    return [Expected(cause="mode.dropout", modules=(first, f"{first}.lora_dropout.{ADAPTER}"))]


FAULTS = (
    Fault(
        name="weights.adapter_missing/one_layer", plant=plant_one_layer, sides=("rollout",),
        summary="the names that the engine merges leave out one layer",
    ),
    Fault(
        name="weights.adapter_missing/switched_off", plant=plant_switched_off, sides=("rollout",),
        summary="the engine holds the adapters and computes without them",
    ),
    Fault(
        name="weights.adapter_scale/alpha_ignored", plant=plant_alpha_ignored, sides=("rollout",),
        summary="the engine scales adapters by 1 in place of alpha over rank, 2",
    ),
    Fault(
        name="weights.adapter_scale/root_of_rank", plant=plant_root_of_rank, sides=("rollout",),
        summary="the engine merges with alpha over the root of the rank",
    ),
    Fault(
        name="head.adapter/left_out", plant=plant_head_left_out, sides=("rollout",),
        summary="the engine merges every adapter but the head's",
    ),
    Fault(
        name="weights.rounded_merge/cycles", plant=plant_cycles, sides=("rollout",), dtypes=("float32",),
        summary="adapters are merged and taken out four times on a bfloat16 grid, then merged",
    ),
    Fault(
        name="mode.dropout/adapter", plant=plant_dropout, sides=("train",), dtypes=("float32",),
        magnitudes=(0.3, 0.1, 0.05), summary="the adapters' dropout is on in training (size: its rate)",
    ),
)  # fmt: skip
