"""Which records of a dump are wanted: msProbe's ``list``, ``scope`` and ``data_mode``. Plain Python.

A record's name is enough to decide. ``list`` holds parts of names; at level mix a module that matches brings all that
happens inside it. ``scope`` holds the first and the last record, both included.
"""

from collections.abc import Iterable, Mapping

from trainfer.integrations.msprobe.names import parse_name
from trainfer.integrations.msprobe.options import DebuggerOptions


def chosen_names(
    options: DebuggerOptions, names: Iterable[str], parents: Mapping[str, str | None]
) -> list[str]:
    """The wanted ones of all record names.

    Args:
        options: Task, level, ``list``, ``scope`` and ``data_mode``.
        names: In the order of execution: a module before what runs inside it.
        parents: The record that each one ran inside.
    """
    ordered = list(names)
    if options.scope:
        ordered = _between(ordered, parents, *options.scope)
    inherits = options.level == "mix"
    return [
        name
        for name in ordered
        if _has_phase(options, name)
        and (not options.names or _is_listed(options, name, parents, inherits=inherits))
    ]


def _between(ordered: list[str], parents: Mapping[str, str | None], first: str, last: str) -> list[str]:
    """From the first record to the end of the last: what runs inside it belongs to it."""
    if first not in ordered:
        return []
    start = ordered.index(first)
    inside = [place for place, name in enumerate(ordered) if last in _ancestry(name, parents)]
    return ordered[start : max(inside, default=len(ordered) - 1) + 1]


def _is_listed(
    options: DebuggerOptions, name: str, parents: Mapping[str, str | None], *, inherits: bool
) -> bool:
    line = _ancestry(name, parents) if inherits else [name]
    return any(part in member for member in line for part in options.names)


def _ancestry(name: str, parents: Mapping[str, str | None]) -> list[str]:
    line: list[str] = []
    current: str | None = name
    while current is not None and current not in line:
        line.append(current)
        current = parents.get(current)
    return line


def _has_phase(options: DebuggerOptions, name: str) -> bool:
    parsed = parse_name(name)
    return ("forward" if parsed is not None and parsed.phase == "forward" else "backward") in options.phases
