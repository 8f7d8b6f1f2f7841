"""A low-rank adapter on a model: which parameters are its own, and what the adapted layers come to as plain weights.

Takes a model whose linear layers ``L`` hold ``L.base_layer``, ``L.lora_A.default`` and ``L.lora_B.default`` (PEFT's
layout: Hu et al., 2021, eq. 3: ``W x + s B A x`` with ``s = alpha / r``) and an ``AdapterLayout``; gives names and merged
weights. Leaves out who puts the adapter there (``integrations.peft``) and how it is trained.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ADAPTER_NAME = "default"
"""PEFT's name of the one adapter of a model."""
BASE = ".base_layer."


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterLayout:
    """Where a model's adapter is.

    Example: ``scalings={"model.layers.0.self_attn.q_proj": 2.0}`` is a rank 8 adapter with alpha 16 on one layer.
    """

    scalings: Mapping[str, float]
    """Adapted layer, under its Transformers name -> alpha / r."""
    config: Mapping[str, object]
    """What PEFT's ``adapter_config.json`` holds."""
    base_folder: str
    """The model folder that the frozen weights came from."""

    @property
    def parameter_names(self) -> frozenset[str]:
        """Of the adapter's own parameters: what trains."""
        return frozenset(name for layer in self.scalings for name in (part(layer, "A"), part(layer, "B")))


def part(layer: str, which: str) -> str:
    """Name of the parameter A ``[r, in]`` or B ``[out, r]`` of an adapted layer."""
    return f"{layer}.lora_{which}.{ADAPTER_NAME}.weight"


def plain_name(name: str) -> str:
    """The name that a parameter of the base has in a model without adapter."""
    return name.replace(BASE, ".")


def merge(base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """``W + s B A`` in float32, whatever the formats; rounding to another one is the caller's, once."""
    return base.float() + torch.mm(b.float(), a.float()) * scaling


def base_names(names: Iterable[str], layout: AdapterLayout) -> dict[str, str]:
    """Plain name -> name in the adapted model, of every parameter that is not the adapter's."""
    own = layout.parameter_names
    return {plain_name(name): name for name in names if name not in own}


def adapted_layer(plain: str, layout: AdapterLayout) -> str | None:
    """The adapted layer whose weight has this plain name; None for every other parameter."""
    layer = plain.removesuffix(".weight")
    return layer if layer != plain and layer in layout.scalings else None
