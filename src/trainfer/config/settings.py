"""Flat settings: every dotted key with its value, where it came from, and what it beat.

Takes entries in the order in which they were given (later wins); gives a mapping. Knows no schema, so that
the planner can use it with another table of defaults and with keys that trainfer does not know.

A leaf is a scalar, a list or an empty mapping; a mapping with content is its leaves.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from trainfer.errors import ConfigError

DEFAULT = "default"
OVERRIDE = "override"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The value of one key. Example: ``Setting(value=60, source="run.yaml:7")``."""

    value: object
    source: str
    """``default``, ``FILE:LINE`` or ``override``."""
    beaten: tuple["Setting", ...] = ()
    """What the key held before, latest first, when a later source replaced it. Never holds defaults."""

    def describe(self) -> str:
        """``override, beats 60 (run.yaml:7)``."""
        losers = ", ".join(f"{loser.value!r} ({loser.source})" for loser in self.beaten)
        return f"{self.source}, beats {losers}" if losers else self.source


class Settings(Mapping[str, Setting]):
    """Dotted key -> ``Setting``, in the order in which the keys were first given."""

    def __init__(self, settings: Mapping[str, Setting]):
        self._settings = dict(settings)

    def __getitem__(self, key: str) -> Setting:
        return self._settings[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def given(self) -> "Settings":
        """Without the defaults."""
        return Settings({k: s for k, s in self._settings.items() if s.source != DEFAULT})

    def nested(self) -> dict[str, object]:
        """The values as nested mappings."""
        return nest({key: setting.value for key, setting in self._settings.items()})


class SettingsBuilder:
    """Collects values in order; a later one beats an earlier one, above and below it too."""

    def __init__(self) -> None:
        self._settings: dict[str, Setting] = {}
        self._deleted: dict[str, Setting] = {}

    def put(self, key: str, value: object, source: str) -> None:
        """Set ``key`` (dotted) to ``value``; a mapping is merged leaf by leaf, as Hydra does.

        A scalar at ``a`` beats everything at ``a.*``, and ``a.b`` beats a scalar at ``a``.
        """
        for leaf_key, leaf in flatten(value, key):
            self._put_leaf(leaf_key, leaf, source)

    def _put_leaf(self, key: str, value: object, source: str) -> None:
        if value == {} and any(k.startswith(f"{key}.") for k in self._settings):
            return  # merging an empty mapping into a filled one changes nothing
        losers: list[Setting] = []
        if key in self._settings:
            losers.append(self._settings[key])
        elif key in self._deleted:
            losers.append(self._deleted.pop(key))
        overlapping = [other for other in self._settings if other != key and _covers(other, key)]
        losers.extend(self._settings.pop(other) for other in overlapping)
        beaten = tuple(earlier for loser in losers for earlier in (replace(loser, beaten=()), *loser.beaten))
        self._settings[key] = Setting(value=value, source=source, beaten=beaten)

    def delete(self, key: str) -> bool:
        """Take back ``key`` and all below it; False when nothing was set there."""
        found = [k for k in self._settings if k == key or k.startswith(f"{key}.")]
        for name in found:
            self._deleted[name] = self._settings.pop(name)
        return bool(found)

    def get(self, key: str) -> Setting | None:
        """What ``key`` holds now."""
        return self._settings.get(key)

    def build(self, defaults: Mapping[str, object]) -> Settings:
        """What was set, and ``defaults`` (dotted key -> value) for the rest.

        A default inside a mapping that was set to a scalar or null is left out.
        """
        settings = dict(self._settings)
        for key, value in defaults.items():
            if key in settings or any(_covers(given, key) for given in self._settings):
                continue
            removed = self._deleted.get(key)
            beaten = () if removed is None else (replace(removed, beaten=()), *removed.beaten)
            settings[key] = Setting(value=value, source=DEFAULT, beaten=beaten)
        return Settings(settings)


def _covers(given: str, key: str) -> bool:
    return given.startswith(f"{key}.") or key.startswith(f"{given}.")


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of nested mappings with their dotted keys; an empty mapping is a leaf.

    Raises ConfigError where a key is not text.
    """
    if not isinstance(value, dict) or not value:
        yield prefix, cast("object", value)
        return
    for name, child in cast(dict[object, object], value).items():
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{prefix}: the key {name!r} is not text. Keys are names; put quotes around it."
            )
        yield from flatten(child, f"{prefix}.{name}" if prefix else name)


def nest(leaves: Mapping[str, object]) -> dict[str, object]:
    """Nested mappings from dotted leaves; the inverse of ``flatten``."""
    root: dict[str, object] = {}
    for key, value in leaves.items():
        *folders, name = key.split(".")
        here = root
        for folder in folders:
            inner = here.setdefault(folder, {})
            assert isinstance(inner, dict), f"{key} lies below a scalar"
            here = cast(dict[str, object], inner)
        here[name] = value
    return root
