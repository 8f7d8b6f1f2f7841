"""What the manifest says of a model: the attributes that decide its maths and are no tensors.

Takes a model; gives plain JSON values. A norm's eps, a rotary module's scaling, an attention's window and soft-cap,
dropout, a router's normalisation, an adapter's scaling are all public attributes of plain type, so all of
those are kept; tensors, modules and private names are not.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn

from trainfer.check.dump.records import ModuleEntry
from trainfer.check.dump.tensors import DTYPE_NAMES
from trainfer.check.probe.names import aliases

_MAX_ITEMS = 64
_MAX_DEPTH = 4
_MAX_TEXT = 500
_VERSIONED = ("torch", "transformers", "vllm", "verl", "peft", "numpy")


@runtime_checkable
class HasDict(Protocol):
    """A Transformers config."""

    def to_dict(self) -> dict[str, object]:
        """Its values."""
        ...


def describe_modules(modules: Mapping[str, nn.Module], root: nn.Module) -> tuple[ModuleEntry, ...]:
    """One entry per module, in the order of definition."""
    others = aliases(root)
    return tuple(
        ModuleEntry(
            name=name,
            kind=type(module).__name__,
            training=module.training,
            attributes=_attributes(module),
            aliases=others.get(name, ()),
        )
        for name, module in modules.items()
    )


def model_config(model: nn.Module) -> dict[str, object]:
    """The config of the model, or of the model inside its wrappers; empty where there is none."""
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, HasDict):
            return {key: plain_value(value) for key, value in config.to_dict().items() if value is not None}
    return {}


def model_dtype(model: nn.Module) -> str:
    """Dtype of the parameters: the one that most elements have."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return DTYPE_NAMES.get(max(counts, key=lambda dtype: counts[dtype]), "unknown") if counts else "none"


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries in use that decide numbers."""
    found = {"python": sys.version.split()[0]}
    for name in _VERSIONED:
        module = sys.modules.get(name)
        version = vars(module).get("__version__") if module is not None else None
        if isinstance(version, str):
            found[name] = str(version)
    return found


def _attributes(module: nn.Module) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name in ("training", "config") or isinstance(value, HasDict):
            continue
        if _is_plain(value, 0):
            found[name] = plain_value(value)
        elif callable(value) and not isinstance(value, nn.Module):
            found[name] = _callable_name(value)
    return found


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, bool | int | float | str | torch.dtype) or value is None:
        return True
    if depth >= _MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        return (
            bool(items)
            and len(items) <= _MAX_ITEMS
            and all(_is_plain(item, depth + 1) for item in items.values())
        )
    if isinstance(value, list | tuple | set | frozenset):
        members = list(cast("Sequence[object]", value))
        return len(members) <= _MAX_ITEMS and all(_is_plain(item, depth + 1) for item in members)
    return False


def plain_value(value: object, depth: int = 0) -> object:
    """As strict JSON: numbers that JSON cannot write and objects become text, long things are cut."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if type(value) in (bool, int, float, type(None)):
        return value
    if isinstance(value, str):
        return str(value)[:_MAX_TEXT]
    if depth < 2 * _MAX_DEPTH and isinstance(value, Mapping):
        items = list(cast("Mapping[object, object]", value).items())[: 4 * _MAX_ITEMS]
        return {str(key): plain_value(item, depth + 1) for key, item in items}
    if depth < 2 * _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        members = list(cast("Sequence[object]", value))[: 4 * _MAX_ITEMS]
        return [plain_value(item, depth + 1) for item in members]
    return str(value)[:_MAX_TEXT]


def _callable_name(value: object) -> str:
    named = value if isinstance(value, type | FunctionType | BuiltinFunctionType) else type(value)
    return f"{named.__module__}.{named.__qualname__}"
