"""What is wrong with rows of data files, gathered so that one message shows it all.

Takes places (file, row, column) with what was found and what is wanted; raises one ``DataError``
that shows the first ten and counts the rest. Memory does not grow with the number of problems.
"""

from pathlib import Path

from trainfer.errors import DataError

SHOWN = 10
"""Problems spelled out; further ones are counted."""
_VALUE_CHARACTERS = 60


def describe(value: object) -> str:
    """Say what a value is, e.g. ``int 3``, ``text 'abc'``, ``a list of 2``; bounded in length."""
    match value:
        case None:
            return "null"
        case str():
            shown = repr(value[:_VALUE_CHARACTERS])
            return f"text {shown}" + ("…" if len(value) > _VALUE_CHARACTERS else "")
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            keys = ", ".join(sorted(map(str, list(value)[:8])))[:_VALUE_CHARACTERS]
            return f"an object with the keys {keys}" if keys else "an empty object"
        case bool() | int() | float():
            return f"{type(value).__name__} {str(value)[:_VALUE_CHARACTERS]}"
        case _:
            return type(value).__name__


class ProblemList:
    """Gathers problems of several files; ``raise_if_any`` ends the reading."""

    def __init__(self) -> None:
        self.count = 0
        self._lines: list[str] = []
        self._remedies: list[str] = []

    def add(
        self,
        path: Path,
        *,
        found: str,
        wanted: str,
        row: int | None = None,
        column: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """Note one problem. ``row`` counts from 0 within its file; None means the file as a whole."""
        self.count += 1
        if len(self._lines) < SHOWN:
            place = ", ".join(
                [str(path)]
                + ([] if row is None else [f"row {row}"])
                + ([] if column is None else [f"column {column}"])
            )
            self._lines.append(f"  {place}: found {found}, wanted {wanted}")
        if remedy is not None and remedy not in self._remedies and len(self._remedies) < SHOWN:
            self._remedies.append(remedy)

    def raise_if_any(self) -> None:
        """Raise one ``DataError`` that holds every problem, or do nothing."""
        if self.count == 0:
            return
        rest = self.count - len(self._lines)
        noun = "problem" if self.count == 1 else "problems"
        lines = [f"the data cannot be used: {self.count} {noun}", *self._lines]
        if rest:
            lines.append(f"  and {rest} more")
        raise DataError("\n".join(lines + [f"→ {remedy}" for remedy in self._remedies]))
