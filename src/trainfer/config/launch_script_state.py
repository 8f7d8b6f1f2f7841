"""What a launch script knows while it is read: variables, exported names, functions, and a budget of work.

A text that cannot be known carries a *mark*: a short piece between NUL characters that names a
reason. Marks travel through expansions like any text, so a value is known exactly when no mark is
in it. NUL cannot occur in a script (such files are refused).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_STEPS = 20_000
MAX_CHARACTERS = 64 * 1024
MAX_WORDS = 4_096
MAX_TOTAL = 4 * 1024 * 1024

_MARK = re.compile("\0[US](\\d+)\0")
_UNSET = re.compile("\0S\\d+\0")


class OutOfBudget(Exception):
    """The script expands to more than is read; what was found until then is kept."""


@dataclass(frozen=True, slots=True)
class ScriptWord:
    """One word after expansion, and the line on which its beginning stands."""

    text: str
    line: int
    is_argument: bool = False
    """True for a word that came from ``"$@"``: the caller's own override."""


Scalar = ScriptWord
Array = list[ScriptWord]
Variable = Scalar | Array | dict[str, ScriptWord]


@dataclass(slots=True)
class Scope:
    """The part that branches copy."""

    variables: dict[str, Variable] = field(default_factory=dict[str, Variable])
    exported: set[str] = field(default_factory=set[str])

    def copied(self) -> "Scope":
        """A copy that does not share arrays."""
        variables: dict[str, Variable] = {}
        for name, value in self.variables.items():
            if isinstance(value, list):
                variables[name] = list(value)
            elif isinstance(value, dict):
                variables[name] = dict(value)
            else:
                variables[name] = value
        return Scope(variables=variables, exported=set(self.exported))


class ScriptState:
    """Variables, marks and budget; knows nothing of syntax."""

    def __init__(self, *, name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self.name = name
        self.scope = Scope()
        self.outside = dict(variables)
        """The reader's own environment and ``--env``; script variables hide it."""
        self.arguments = [ScriptWord(text, 0, is_argument=True) for text in arguments]
        self.frames: list[list[ScriptWord]] = []
        """Arguments of the functions that are being called."""
        self.notes: list[str] = []
        self._reasons: list[str] = []
        self._reason_numbers: dict[tuple[str, str], int] = {}
        self._steps = 0
        self._characters = 0

    def step(self) -> None:
        """Count one unit of work."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise OutOfBudget(f"{self.name} takes more than {MAX_STEPS} steps")

    def sized(self, text: str) -> str:
        """The text itself, if it is not too long and there is not too much of it in all."""
        self._characters += len(text)
        if len(text) > MAX_CHARACTERS or self._characters > MAX_TOTAL:
            raise OutOfBudget(f"{self.name} expands to too much text")
        return text

    def note(self, line: int, text: str) -> None:
        """Say something about a line, once."""
        message = f"{self.name}:{line}: {text}"
        if message not in self.notes and len(self.notes) < 50:
            self.notes.append(message)

    def unknown(self, why: str, line: int) -> str:
        """A mark for a value that cannot be known statically."""
        return self._mark("U", f"{why} in {self.name}:{line}")

    def unset(self, name: str, line: int) -> str:
        """A mark for a variable without a value: empty in a test, not known in an override."""
        return self._mark("S", f"${name} has no value in {self.name}:{line}; give --env {name}=VALUE")

    def _mark(self, kind: str, reason: str) -> str:
        number = self._reason_numbers.setdefault((kind, reason), len(self._reasons))
        if number == len(self._reasons):
            self._reasons.append(reason)
        return f"\0{kind}{number}\0"

    def reason(self, text: str) -> str | None:
        """Why ``text`` is not known; None when it is."""
        match = _MARK.search(text)
        return None if match is None else self._reasons[int(match.group(1))]

    def frame(self) -> list[ScriptWord]:
        """What ``"$@"`` is here."""
        return self.frames[-1] if self.frames else self.arguments

    def environment(self) -> dict[str, str]:
        """Exported variables with known values, over the reader's own environment."""
        found = dict(self.outside)
        for name in self.scope.exported:
            value = self.scope.variables.get(name)
            if isinstance(value, ScriptWord) and self.reason(value.text) is None:
                found[name] = value.text
        return found


def without_unset(text: str) -> str:
    """``text`` with variables that have no value as empty, as bash has them in a test."""
    return _UNSET.sub("", text)


def is_marked(text: str) -> bool:
    """True when some part is not known."""
    return "\0" in text


def merged(first: Scope, second: Scope, mark: str, line: int) -> Scope:
    """What is known after one of two branches has run: values that differ are not."""
    result = first.copied()
    for name in {*first.variables, *second.variables}:
        if first.variables.get(name) != second.variables.get(name):
            result.variables[name] = ScriptWord(mark, line)
    result.exported = first.exported | second.exported
    return result
