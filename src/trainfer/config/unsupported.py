"""What an entry of the table of verl's keys that training does not honour looks like, and the table's look-up.

The entries are in ``unsupported_table``. Leaves out unknown keys, which are nobody's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsupported:
    """One entry. Example: ``critic.*`` with nothing harmless: "GRPO has no critic …"."""

    pattern: str
    """Dotted key; ``*`` stands for anything, dots included."""
    sentence: str
    """Why, and what to use instead."""
    harmless: Sequence[object] = ()
    """Values that ask for nothing: accepted in silence, without effect."""
    refused: Sequence[object] = ()
    """Where given, only these values are refused, and the schema checks the others."""

    def matches(self, key: str) -> bool:
        """True where the entry speaks of ``key``."""
        return fnmatchcase(key, self.pattern)

    def accepts(self, value: object) -> bool:
        """True where ``value`` may stand."""
        if self.refused:
            return not any(_same(value, other) for other in self.refused)
        return any(_same(value, other) for other in self.harmless)


def _same(a: object, b: object) -> bool:
    """Equal, where true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


OFF: tuple[object, ...] = (None, False, 0, "", {})
"""What asks for nothing, for most keys."""


def entry(
    pattern: str, sentence: str, harmless: Sequence[object] = (), refused: Sequence[object] = ()
) -> Unsupported:
    """An entry, by position: the table reads as a table."""
    return Unsupported(pattern=pattern, sentence=sentence, harmless=harmless, refused=refused)
