"""Adapters in PEFT's layout, compared by their effective weight.

Takes the weights of one version of both sides; gives findings for layers that one side keeps as base + scaling · B A and the
other as one merged weight, or as the bare base. The merge is computed in float32; what rounding to the stored dtype may do
is allowed. Without values (``weights="full"``) only the bare base can be told, and a zero B.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfer.check.align.weights import Weight, Weights
from trainfer.check.compare.source import ReadableSide
from trainfer.check.compare.tolerance import tolerances

_PART = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])\.(?P<adapter>[^.]+)\.weight")
_ROUNDING_UNITS = 4.0

Value = Callable[[Weight], Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFinding:
    """One adapted layer."""

    weight: Weight
    kind: str | None
    """None where the effective weights agree or nothing could be proven."""
    note: str = ""


def adapted_layers(weights: Weights) -> dict[str, dict[str, tuple[Weight, Weight]]]:
    """Layer -> adapter -> (A, B)."""
    found: dict[str, dict[str, dict[str, Weight]]] = {}
    for name, weight in weights.items():
        match = _PART.fullmatch(name)
        if match is not None:
            found.setdefault(match["layer"], {}).setdefault(match["adapter"], {})[match["part"]] = weight
    return {
        layer: {adapter: (parts["A"], parts["B"]) for adapter, parts in adapters.items() if len(parts) == 2}
        for layer, adapters in found.items()
    }


def scalings(side: ReadableSide) -> dict[str, Mapping[str, object]]:
    """Layer -> adapter -> alpha / r, as the manifest says."""
    found: dict[str, Mapping[str, object]] = {}
    for module in side.manifest.modules:
        scaling = module.attributes.get("scaling")
        if isinstance(scaling, Mapping):
            found[module.name] = scaling
    return found


def compare_adapters(
    adapted: Weights, other: Weights, side: ReadableSide, values: tuple[Value, Value]
) -> list[AdapterFinding]:
    """Layers that are adapted on one side and one weight on the other.

    Args:
        adapted: The weights of the side with adapters.
        other: Those of the other one.
        side: The side with adapters: its manifest knows their scaling.
        values: How to read a weight of the adapted and of the other side; None where it was not captured.
    """
    findings: list[AdapterFinding] = []
    known = scalings(side)
    theirs = adapted_layers(other)
    for layer, adapters in adapted_layers(adapted).items():
        base, whole = adapted.get(f"{layer}.weight"), other.get(f"{layer}.weight")
        if layer in theirs or base is None or whole is None:
            continue
        zero = all(_is_zero(b) for _, b in adapters.values())
        if base.fingerprint == whole.fingerprint:
            kind = None if zero else "adapter_missing"
            findings.append(AdapterFinding(weight=whole, kind=kind))
            continue
        findings.append(_merged(base, whole, adapters, known.get(layer, {}), values))
    return findings


def _is_zero(weight: Weight) -> bool:
    """Zeros have sums of zero."""
    digits = weight.fingerprint.rpartition(":")[2]
    return bool(digits) and set(digits) == {"0"}


def _merged(
    base: Weight,
    whole: Weight,
    adapters: Mapping[str, tuple[Weight, Weight]],
    scaling: Mapping[str, object],
    values: tuple[Value, Value],
) -> AdapterFinding:
    stored, merged = values[0](base), values[1](whole)
    delta = _delta(adapters, scaling, values[0])
    if stored is None or merged is None or delta is None or stored.shape != merged.shape:
        note = 'merged adapters are proven only where values were captured (weights="full")'
        return AdapterFinding(weight=whole, kind=None, note=note)
    difference = merged.float() - stored.float()
    allowed = _ROUNDING_UNITS * tolerances().unit_of((base.dtype, whole.dtype)) * float(merged.abs().max())
    if float((difference - delta).abs().max()) <= allowed:
        return AdapterFinding(weight=whole, kind=None)
    grid = _grid_of(merged, stored.float() + delta)
    if grid:
        note = f"the merged weight is base and adapter rounded to {grid}"
        return AdapterFinding(weight=whole, kind="adapter_rounded", note=note)
    factor = float((difference * delta).sum() / delta.square().sum().clamp_min(1e-30))
    if float((difference - factor * delta).abs().max()) <= allowed * max(1.0, abs(factor)):
        if abs(factor) * float(delta.abs().max()) <= allowed:
            return AdapterFinding(weight=whole, kind="adapter_missing")
        note = f"the merged weight holds {factor:.4g} times the adapter"
        return AdapterFinding(weight=whole, kind="adapter_scale", note=note)
    return AdapterFinding(weight=whole, kind="differs")


_GRIDS = {"BF16": torch.bfloat16, "F16": torch.float16}
_ON_GRID = 0.99
"""Of the elements: so many must be the rounded sum, the others lie between two points of the grid."""


def _grid_of(merged: Tensor, whole: Tensor) -> str:
    """The low precision to which a merged weight was rounded; empty where to none."""
    for name, dtype in _GRIDS.items():
        if float((merged.float() == whole.to(dtype).float()).float().mean()) >= _ON_GRID:
            return name
    return ""


def _delta(
    adapters: Mapping[str, tuple[Weight, Weight]], scaling: Mapping[str, object], value: Value
) -> Tensor | None:
    total: Tensor | None = None
    for name, (a, b) in adapters.items():
        first, second, factor = value(a), value(b), scaling.get(name)
        if first is None or second is None or not isinstance(factor, int | float):
            return None
        part = torch.mm(second.float(), first.float()) * float(factor)
        total = part if total is None else total + part
    return total
