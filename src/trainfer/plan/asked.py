"""What was asked for: configuration values by dotted key, read with a type or not at all.

Rules are straight functions of :class:`Asked`. A value that is not known (a shell variable
without a value, text where a number belongs) raises :class:`NotKnown` where it is read, and
:func:`known` turns that into "this rule says nothing"; the value itself is reported once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trainfer.plan.records import Value

T = TypeVar("T")

MAX_COUNT = 10**12
"""No batch is larger; a number above is a mistake, and would only make arithmetic slow."""


class NotKnown(Exception):
    """The value of a key is not known, or is not of the kind that the reader needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Values by full dotted key. Keys that are absent read as null."""

    values: Mapping[str, Value]
    unknown: frozenset[str] = field(default_factory=frozenset[str])
    """Keys that were set to something which cannot be known statically."""
    given: frozenset[str] = field(default_factory=frozenset[str])
    """Keys that a file, a script or an override sets; the others hold defaults."""
    attention_heads: int | None = None
    """Query heads of the model; None where its ``config.json`` is not at hand."""
    key_value_heads: int | None = None

    def value(self, key: str) -> Value:
        """The value as it stands; null where absent."""
        if key in self.unknown:
            raise NotKnown(key)
        return self.values.get(key)

    def optional_count(self, key: str) -> int | None:
        """A positive whole number, or null."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
            raise NotKnown(key)
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; ``default`` stands in for null."""
        value = self.optional_count(key)
        if value is None:
            value = default
        if value is None:
            raise NotKnown(key)
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """Any whole number, such as ``fsdp_size=-1``."""
        value = self.value(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_COUNT:
            raise NotKnown(key)
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false; ``default`` stands in for null."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise NotKnown(key)
        return value

    def text(self, key: str, default: str = "") -> str:
        """A string; ``default`` stands in for null."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise NotKnown(key)
        return value

    def with_values(self, changes: Mapping[str, Value]) -> "Asked":
        """The same with some values replaced."""
        return replace(
            self,
            values={**self.values, **changes},
            unknown=self.unknown.difference(changes),
            given=self.given.union(changes),
        )

    def named(self, key: str) -> str:
        """``key=value``, marked where the value is only the default."""
        mark = "" if key in self.given else " (the default)"
        return f"{key}={shown(self.value(key))}{mark}"


def shown(value: Value) -> str:
    """A value as it is written in YAML and in overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        return f"{'-' if value < 0 else ''}a number above {MAX_COUNT}"
    return str(value)


def known(read: Callable[[], T]) -> T | None:
    """What ``read`` returns, or None when it needs a value that is not known."""
    try:
        return read()
    except NotKnown:
        return None
