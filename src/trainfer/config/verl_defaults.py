"""verl's own defaults, flattened, as two releases publish them; and the interpolations among their values.

The JSON files are written by ``tests/golden/make_verl_defaults.py`` from the installed wheels. Only
references to other keys are resolved (``${a.b}``, ``${oc.select:a.b,default}``, relative ones with
leading dots) and environment variables; anything else stays as it is and counts as not known.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict, cast

Release = Literal["0.6.1", "0.9.1"]

MAX_DEPTH = 20
_WHOLE = re.compile(r"^\$\{([^${}]*)\}$")
_INSIDE = re.compile(r"\$\{([^${}]*)\}")
_NUMBER = re.compile(r"^[-+]?\d{1,18}$")


class _Defaults(TypedDict):
    verl: str
    fsdp: dict[str, object]
    megatron: "_Changes"


class _Changes(TypedDict):
    changed: dict[str, object]
    absent: list[str]


class Unresolved(Exception):
    """An interpolation that cannot be known: its text is the message."""


@functools.cache
def _read(release: Release) -> _Defaults:
    file = Path(__file__).with_name(f"verl_defaults_{release}.json")
    return cast("_Defaults", json.loads(file.read_bytes()))


def verl_defaults(release: Release, *, megatron: bool = False) -> dict[str, object]:
    """Dotted key -> default, not resolved; of the Megatron configuration where that is asked for."""
    document = _read(release)
    if not megatron:
        return dict(document["fsdp"])
    absent = set(document["megatron"]["absent"])
    merged = {key: value for key, value in document["fsdp"].items() if key not in absent}
    return {**merged, **document["megatron"]["changed"]}


def resolved(values: Mapping[str, object], key: str, environment: Mapping[str, str]) -> object:
    """The value of ``key`` with its references followed; raises :class:`Unresolved`."""
    return _follow(values, key, values.get(key), environment, depth=0)


def _follow(
    values: Mapping[str, object], key: str, value: object, environment: Mapping[str, str], *, depth: int
) -> object:
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > MAX_DEPTH or len(value) > 4096:
        raise Unresolved(value[:80])
    whole = _WHOLE.match(value)
    if whole is not None:
        return _reference(values, key, whole.group(1), environment, depth=depth)

    def text(match: re.Match[str]) -> str:
        return str(_reference(values, key, match.group(1), environment, depth=depth))

    replaced = _INSIDE.sub(text, value)
    return _follow(values, key, replaced, environment, depth=depth + 1)


def _reference(
    values: Mapping[str, object], key: str, body: str, environment: Mapping[str, str], *, depth: int
) -> object:
    resolver, colon, arguments = body.partition(":")
    if not colon:
        target = _absolute(key, body.strip())
        if target not in values:
            raise Unresolved(f"${{{body}}}")
        return _follow(values, target, values[target], environment, depth=depth + 1)
    name, comma, fallback = arguments.partition(",")
    if resolver.strip() == "oc.select":
        target = _absolute(key, name.strip())
        found = values.get(target)
        if target in values and (found is not None or not comma):
            return _follow(values, target, found, environment, depth=depth + 1)
        return _literal(fallback) if comma else None
    if resolver.strip() == "oc.env":
        given = environment.get(name.strip())
        if given is None and not comma:
            raise Unresolved(f"${{{body}}}")
        return fallback.strip() if given is None else given
    raise Unresolved(f"${{{body}}}")


def _absolute(key: str, name: str) -> str:
    """A relative name (one leading dot: a sibling; each further dot: one level up) made absolute."""
    bare = name.lstrip(".")
    up = len(name) - len(bare)
    if not up:
        return bare
    parents = key.split(".")[:-up]
    return ".".join([*parents, bare])


def _literal(text: str) -> object:
    text = text.strip()
    lowered = text.lower()
    if lowered in ("null", "none", ""):
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _NUMBER.match(text):
        return int(text)
    try:
        return cast("object", json.loads(text))
    except ValueError:
        return text
