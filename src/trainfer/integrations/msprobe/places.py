"""Where in msProbe's records a captured tensor stands: names and nested lists. Plain Python.

Takes a record's module, function, role and name; gives the record's name, the field (``input_args`` ...) and the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from trainfer.check.dump.records import Role, TensorRecord

_PHASES = {
    Role.INPUT: ("forward", "input"),
    Role.OUTPUT: ("forward", "output"),
    Role.OUTPUT_GRADIENT: ("backward", "input"),
    Role.INPUT_GRADIENT: ("backward", "output"),
}
_FAMILIES = (
    ("torch.nn.functional.", "Functional"),
    ("torch.Tensor.", "Tensor"),
    ("torch._C._nn.", "Functional"),
    ("torch.distributed.", "Distributed"),
    ("torch.ops.aten.", "Aten"),
    ("torch._VF.", "VF"),
    ("torch.", "Torch"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """Where a tensor goes. Example: field ``input_kwargs``, path ``hidden_states``, direction ``input``."""

    field: str
    path: str
    """Empty for the next free place."""
    suffix: str
    """Of the file, after the record's name: ``kwargs.hidden_states``; of a gradient without its place."""
    direction: str
    """``input`` or ``output``."""


def phase_of(record: TensorRecord) -> str | None:
    """``forward``, ``backward``, ``parameters_grad``, or None for what msProbe has no place for.

    Gradients of keyword arguments have none: its hooks see positional ones alone.
    """
    if record.role is Role.PARAMETER_GRADIENT:
        return "parameters_grad"
    if record.role is Role.INPUT_GRADIENT and not record.name[:1].isdigit():
        return None
    place = _PHASES.get(record.role)
    return None if place is None else place[0]


def spot_of(record: TensorRecord) -> Spot:
    """Field and file of a record that has a phase."""
    if record.role is Role.PARAMETER_GRADIENT:
        return Spot(field="", path=f"{record.name}.0", suffix=record.name, direction="output")
    phase, direction = _PHASES[record.role]
    first = record.name.partition(".")[0]
    if phase == "backward":
        # A flat tuple to msProbe: what a mapping held follows in its order.
        return Spot(
            field=direction, path=first if first.isdigit() else "", suffix=direction, direction=direction
        )
    if phase == "forward" and direction == "input":
        if not first.isdigit():
            suffix = f"kwargs.{record.name}"
            return Spot(field="input_kwargs", path=record.name, suffix=suffix, direction=direction)
        return Spot(field="input_args", path=record.name, suffix=f"input.{record.name}", direction=direction)
    # What a module returns is a tuple to msProbe: a mapping is its first member.
    path = record.name if first.isdigit() else f"0.{record.name}"
    return Spot(field=direction, path=path, suffix=f"{direction}.{path}", direction=direction)


def function_record(function: str) -> str:
    """``torch.nn.functional.silu`` is ``Functional.silu``."""
    for prefix, family in _FAMILIES:
        if function.startswith(prefix):
            return f"{family}.{function.removeprefix(prefix)}"
    return f"Torch.{function.rpartition('.')[2]}"


def blank_record(phase: str) -> dict[str, object]:
    """A record without tensors."""
    if phase == "forward":
        return {"input_args": [], "input_kwargs": {}, "output": []}
    return {"input": [], "output": []} if phase == "backward" else {}


def put(record: dict[str, object], field: str, path: str, leaf: object) -> None:
    """Put a leaf into a record: lists grow with null up to the place, mappings by key.

    Example: field ``input_args``, path ``1.0``: second argument, its first member.
    """
    parts = path.split(".")
    if not field:
        field, parts = path.removesuffix(".0"), ["0"]
    container: object = record.setdefault(field, [] if parts[0].isdigit() else {})
    for place, part in enumerate(parts[:-1]):
        container = _child(container, part, is_list=parts[place + 1].isdigit())
    _set(container, parts[-1], leaf)


def _child(container: object, part: str, *, is_list: bool) -> object:
    if isinstance(container, list):
        members = cast("list[object]", container)
        place = int(part)
        members.extend([None] * (place + 1 - len(members)))
        if not isinstance(members[place], dict | list):
            members[place] = [] if is_list else {}
        return members[place]
    mapping = cast("dict[str, object]", container)
    if not isinstance(mapping.get(part), dict | list):
        mapping[part] = [] if is_list else {}
    return mapping[part]


def _set(container: object, part: str, leaf: object) -> None:
    if isinstance(container, list):
        members = cast("list[object]", container)
        place = int(part) if part.isdigit() else len(members)
        members.extend([None] * (place + 1 - len(members)))
        members[place] = leaf
    else:
        cast("dict[str, object]", container)[part] = leaf


def next_place(record: Mapping[str, object], field: str) -> str:
    """The first free place of a list."""
    members = record.get(field)
    return str(len(cast("list[object]", members)) if isinstance(members, list) else 0)


def nearest_parent(module: str, running: Mapping[str, str]) -> str | None:
    """The record of the nearest enclosing module, by its name."""
    while module:
        module = module.rpartition(".")[0]
        if module and module in running:
            return running[module]
    return None
