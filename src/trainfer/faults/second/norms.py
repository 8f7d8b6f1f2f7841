"""Faults of norms: eps forgotten or another, the other family's cast order, a root or an input in fewer bits.

Takes a pair; changes norms of one side.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfer.faults.fault import Fault
from trainfer.faults.models import LAYERS, layer_name
from trainfer.faults.pair import Pair
from trainfer.faults.records import Expected
from trainfer.faults.second.patch import Forward, replace_forward

FIRST = ("model.layers.0.input_layernorm",)


def norms(model: nn.Module) -> Iterator[Any]:
    """Every RMS norm."""
    return (module for module in model.modules() if type(module).__name__.endswith("RMSNorm"))


def plant_layer_norm(pair: Pair) -> list[Expected]:
    """A port of GPT-2 whose layer norms have another eps."""
    name = f"{layer_name(pair.clean, pair.case.layer)}.ln_1"
    pair.find(name).eps = pair.size
    return [Expected(cause="norm.eps", modules=(name,))]


def plant_query_key(pair: Pair) -> list[Expected]:
    """Query and key norms were built with the class's default eps, not with the config's."""
    for layer in range(LAYERS):
        for part in ("q_norm", "k_norm"):
            pair.find(f"model.layers.{layer}.self_attn.{part}").variance_epsilon = pair.size
    return [Expected(cause="norm.eps", modules=("model.layers.0.self_attn.q_norm",))]


def _torch_default(norm: nn.RMSNorm) -> Forward:
    return lambda _, hidden: functional.rms_norm(hidden, norm.weight.shape, norm.weight)


def plant_forgotten(pair: Pair) -> list[Expected]:
    """Norms by torch's function, with its default eps."""
    for norm in norms(pair.faulty):
        replace_forward(norm, _torch_default(norm))
    return [Expected(cause="norm.eps", modules=FIRST)]


def _llama_order(norm: Any) -> Forward:
    return lambda _, hidden: norm._norm(hidden.float()).type_as(hidden) * (1.0 + norm.weight)


def plant_llama_in_gemma(pair: Pair) -> list[Expected]:
    """Gemma-2 by a Llama kernel: rounded, then multiplied by one plus the weight."""
    for norm in norms(pair.faulty):
        replace_forward(norm, _llama_order(norm))
    return [Expected(cause="norm.cast_order", modules=FIRST)]


def plant_root(pair: Pair) -> list[Expected]:
    """One norm's reciprocal root is kept in bfloat16."""
    name = f"{layer_name(pair.clean, pair.case.layer)}.post_attention_layernorm"
    norm = pair.find(name)

    def rounded(_: Forward, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).bfloat16().float()
        return norm.weight * (wide * root).to(hidden.dtype)

    replace_forward(norm, rounded)
    return [Expected(cause="norm.precision", modules=(name,))]


def plant_half_layer_norm(pair: Pair) -> list[Expected]:
    """One of GPT-2's norms takes its input in bfloat16, as under autocast lists that name it."""
    name = f"{layer_name(pair.clean, pair.case.layer)}.ln_2"
    replace_forward(
        pair.find(name),
        lambda forward, hidden: forward(hidden.bfloat16().float()).bfloat16().to(hidden.dtype),
    )
    return [Expected(cause="norm.precision", modules=(name,))]


FAULTS = (
    Fault(
        name="norm.eps/layer_norm", plant=plant_layer_norm, architectures=("gpt2",), magnitudes=(1e-3, 1e-4, 1e-12),
        summary="one of GPT-2's norms has another eps (1e-5 is right)",
    ),
    Fault(
        name="norm.eps/query_key", plant=plant_query_key, architectures=("qwen3",), magnitudes=(1e-2, 1e-3, 1e-5),
        summary="query and key norms have another eps (1e-6 is right)",
    ),
    Fault(
        name="norm.eps/forgotten", plant=plant_forgotten, dtypes=("float32",),
        summary="every norm is torch's function with its default eps",
    ),
    Fault(
        name="norm.cast_order/llama_in_gemma", plant=plant_llama_in_gemma, architectures=("gemma2",),
        dtypes=("bfloat16",), summary="Gemma-2's norms round before they multiply",
    ),
    Fault(
        name="norm.precision/root", plant=plant_root, dtypes=("float32",),
        summary="one norm's reciprocal root in bfloat16",
    ),
    Fault(
        name="norm.precision/layer_norm", plant=plant_half_layer_norm, architectures=("gpt2",),
        dtypes=("float32",), summary="one of GPT-2's norms reads and writes bfloat16",
    ),
)  # fmt: skip
