"""What a parsed override is; apart from its parser, so that the planner starts without Hydra."""

import enum
from dataclasses import dataclass


class OverrideKind(enum.Enum):
    """What an override does to its key."""

    CHANGE = ""
    """``key=value``: in Hydra the key must exist."""
    ADD = "+"
    """``+key=value``: in Hydra the key must not exist."""
    FORCE_ADD = "++"
    """``++key=value``: either way."""
    DELETE = "~"
    """``~key``: takes the key back; ``~key=value`` only where it holds that value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One parsed override. Example: ``+a.b=3`` is ``Override(kind=ADD, key="a.b", value=3, text="+a.b=3")``."""

    kind: OverrideKind
    key: str
    value: object
    has_value: bool
    """False for ``~key`` alone."""
    text: str
