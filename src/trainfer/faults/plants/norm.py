"""norm.*: eps, the order of casts, the variance's precision."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainfer.faults.fault import Fault
from trainfer.faults.models import layer_name
from trainfer.faults.pair import Pair
from trainfer.faults.plants.modules import norms_of, replace_forward, rms_eps
from trainfer.faults.records import Expected

_EPS = (1e-2, 1e-3, 1e-4, 1e-5, 3e-6)


def _one_norm(pair: Pair) -> str:
    names = [
        name for name, _ in norms_of(pair.faulty) if name.startswith(layer_name(pair.faulty, pair.case.layer))
    ]
    names = [name for name in names if name.endswith("layernorm")] + ["model.norm"]
    return names[pair.seed % len(names)]


def plant_eps(pair: Pair) -> Sequence[Expected]:
    """One norm adds another eps."""
    name = _one_norm(pair)
    module = pair.find(name)
    setattr(module, rms_eps(module), pair.size)
    return [Expected(cause="norm.eps", modules=(name,))]


def plant_eps_everywhere(pair: Pair) -> Sequence[Expected]:
    """All norms take another eps, as from a config that was read wrongly."""
    for _, module in norms_of(pair.faulty):
        setattr(module, rms_eps(module), pair.size)
    return [Expected(cause="norm.eps", modules=("model.layers.0.input_layernorm",))]


def plant_eps_outside(pair: Pair) -> Sequence[Expected]:
    """One norm adds eps to the root instead of to the variance."""
    name = _one_norm(pair)

    def forward(module: Any, hidden: Tensor) -> Tensor:
        x = hidden.float()
        x = x / (x.pow(2).mean(-1, keepdim=True).sqrt() + pair.size)
        return module.weight * x.to(hidden.dtype)

    replace_forward(pair.find(name), forward)
    return [Expected(cause="norm.eps", modules=(name,))]


def _multiplied_first(module: Any, hidden: Tensor) -> Tensor:
    x = hidden.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + getattr(module, rms_eps(module)))
    return (module.weight.float() * x).to(hidden.dtype)


def plant_cast_order(pair: Pair) -> Sequence[Expected]:
    """All norms multiply by the weight before they round, as engines' fused kernels do."""
    for _, module in norms_of(pair.faulty):
        replace_forward(module, _multiplied_first)
    return [Expected(cause="norm.cast_order", modules=("model.layers.0.input_layernorm",))]


def plant_variance_in_bf16(pair: Pair) -> Sequence[Expected]:
    """One norm squares and averages in bfloat16."""
    name = _one_norm(pair)

    def forward(module: Any, hidden: Tensor) -> Tensor:
        variance = hidden.bfloat16().pow(2).mean(-1, keepdim=True).float()
        x = hidden.float() * torch.rsqrt(variance + getattr(module, rms_eps(module)))
        return module.weight * x.to(hidden.dtype)

    replace_forward(pair.find(name), forward)
    return [Expected(cause="norm.precision", modules=(name,))]


FAULTS = (
    Fault(name="norm.eps/one", plant=plant_eps, magnitudes=_EPS, summary="one norm's eps is another (1e-6 is right)"),
    Fault(
        name="norm.eps/all", plant=plant_eps_everywhere, magnitudes=(1e-3, 1e-4, 1e-5, 1e-2, 3e-6),
        summary="every norm's eps is another",
    ),
    Fault(
        name="norm.eps/outside", plant=plant_eps_outside, magnitudes=(1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
        summary="eps is added after the root",
    ),
    Fault(
        name="norm.cast_order/all", plant=plant_cast_order, dtypes=("bfloat16",),
        summary="norms multiply by the weight before they round to bfloat16",
    ),
    Fault(
        name="norm.precision/variance", plant=plant_variance_in_bf16,
        summary="one norm's variance is computed in bfloat16",
    ),
)  # fmt: skip
