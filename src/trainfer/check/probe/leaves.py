"""Finds the tensors in whatever a module takes or gives.

Takes arguments and outputs of any nesting; gives (name, tensor) pairs in a fixed order. Tuples, lists,
mappings, named tuples and dataclasses are entered; key-value caches, plain values and callables are passed over;
any other object is named, so that it can be told.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, slice,
    torch.Generator, torch.nn.Module,
)  # fmt: skip
_MAX_DEPTH = 8


@runtime_checkable
class KeyValueCache(Protocol):
    """Transformers' caches: state, not a result."""

    def get_seq_length(self) -> int:
        """Slots that hold keys and values."""
        ...


@runtime_checkable
class RowPlan(Protocol):
    """trainfer's attention plans: they say who attends to whom, and are no result either."""

    @property
    def attend(self) -> Callable[..., Tensor]:
        """Attention."""
        ...


def tensor_leaves(value: object, name: str, unknown: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Pairs (``name`` with the way to the tensor, tensor); types that cannot be entered go to ``unknown``."""
    yield from _walk(value, name, unknown, 0)


def argument_leaves(
    args: tuple[object, ...], kwargs: Mapping[str, object], unknown: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a call: positional ones under their place, the others under their keyword."""
    for place, value in enumerate(args):
        if isinstance(value, Tensor):
            yield str(place), value
        elif value is not None:
            yield from _walk(value, str(place), unknown, 1)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            yield name, value
        elif value is not None:
            yield from _walk(value, name, unknown, 1)


def _walk(value: object, name: str, unknown: list[str], depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    if isinstance(value, _PLAIN):
        return
    children = _children(value)
    if children is None:
        if not isinstance(value, KeyValueCache | RowPlan) and not callable(value):
            unknown.append(f"{type(value).__module__}.{type(value).__qualname__}")
    elif depth >= _MAX_DEPTH:
        unknown.append(f"{type(value).__name__} nested deeper than {_MAX_DEPTH} levels")
    else:
        for key, item in children:
            yield from _walk(item, f"{name}.{key}" if depth else key, unknown, depth + 1)


def _children(value: object) -> list[tuple[str, object]] | None:
    """Named parts of a container, or None where it is not one that is entered."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in cast("Mapping[object, object]", value).items()]
    if isinstance(value, tuple | list | set | frozenset):
        return [(str(place), item) for place, item in enumerate(cast("Sequence[object]", value))]
    if dataclasses.is_dataclass(value) and not isinstance(value, KeyValueCache | RowPlan):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None
