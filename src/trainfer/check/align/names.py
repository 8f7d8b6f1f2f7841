"""Names of modules and parameters as Transformers gives them.

Takes the name that a framework gave; gives the canonical one. The rules are data (``names.json``); an
integration may hand in more. Which modules are fused into one is data too, what to do then is in ``adapters``.
"""

from functools import cache
from importlib.resources import files

import msgspec


class Rename(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from", "target": "to"}
):
    """A run of dotted parts that is called otherwise in Transformers."""

    source: str
    target: str


class Fused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One module that does the work of several, side by side in its output."""

    module: str
    parts: tuple[str, ...]
    layouts: tuple[str, ...]
    """How the parts may lie in the output; the first one is expected. See ``adapters.columns``."""


class OutputIsInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module whose output is what its neighbour takes."""

    module: str
    next: str


class NameMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rules."""

    drop_parts: tuple[str, ...]
    drop_prefixes: tuple[str, ...]
    rename: tuple[Rename, ...]
    fused: tuple[Fused, ...]
    output_is_input_of: tuple[OutputIsInput, ...]


@cache
def name_map() -> NameMap:
    """The rules that come with trainfer."""
    return msgspec.json.decode(
        files("trainfer.check.align").joinpath("names.json").read_bytes(), type=NameMap
    )


def canonical(name: str, names: NameMap) -> str:
    """The Transformers name. Example: ``module.model.layers.0._fsdp_wrapped_module.mlp`` is ``model.layers.0.mlp``."""
    dropped = set(names.drop_parts)
    name = ".".join(part for part in name.split(".") if part not in dropped)
    for prefix in names.drop_prefixes:
        name = name.removeprefix(prefix)
    for rule in names.rename:
        name = _rename(name, rule)
    return name


def _rename(name: str, rule: Rename) -> str:
    if rule.source not in name:
        return name
    parts, source = name.split("."), rule.source.split(".")
    for start in range(len(parts) - len(source) + 1):
        if parts[start : start + len(source)] == source:
            return ".".join([*parts[:start], *rule.target.split("."), *parts[start + len(source) :]])
    return name


def parent_of(name: str) -> str:
    """The enclosing module; empty for a top one."""
    return name.rpartition(".")[0]


def sibling(name: str, other: str) -> str:
    """Another module with the same parent."""
    parent = parent_of(name)
    return f"{parent}.{other}" if parent else other
