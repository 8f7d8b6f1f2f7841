"""How two lists of token ids differ: edit script, common prefix, lag.

Takes token ids; gives spans. Plain Python; bounded work on any input.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MIDDLE = 2048
"""Longest differing middle that is aligned token by token; a longer one is one replacement."""
MAX_LAG = 8
_MIN_OVERLAP = 4
_LAG_SHARE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One difference. Example: 8 before index 7 of the second list is ``Edit("insert", 7, 7, 7, 8)``."""

    kind: str
    """``replace``, ``delete`` (only the first list has it) or ``insert`` (only the second)."""
    first_start: int
    first_stop: int
    second_start: int
    second_stop: int


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    limit = min(len(first), len(second))
    for index in range(limit):
        if first[index] != second[index]:
            return index
    return limit


def edit_script(first: Sequence[int], second: Sequence[int]) -> tuple[Edit, ...]:
    """The differences in order; empty where the lists are equal."""
    start = common_prefix(first, second)
    middle_first, middle_second = list(first[start:]), list(second[start:])
    tail = common_prefix(middle_first[::-1], middle_second[::-1])
    if tail:
        middle_first, middle_second = middle_first[:-tail], middle_second[:-tail]
    if not middle_first and not middle_second:
        return ()
    if max(len(middle_first), len(middle_second)) > MAX_MIDDLE:
        return (_edit("replace", start, 0, len(middle_first), 0, len(middle_second)),)
    matcher = difflib.SequenceMatcher(None, middle_first, middle_second, autojunk=False)
    return tuple(_edit(kind, start, *spans) for kind, *spans in matcher.get_opcodes() if kind != "equal")


def _edit(
    kind: str, start: int, first_start: int, first_stop: int, second_start: int, second_stop: int
) -> Edit:
    return Edit(
        kind=kind,
        first_start=start + first_start,
        first_stop=start + first_stop,
        second_start=start + second_start,
        second_stop=start + second_stop,
    )


def lag(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The shift k for which ``second[i + k] == first[i]`` nearly everywhere; None where there is none.

    Example: lag([1, 2, 3, 4, 5], [9, 1, 2, 3, 4]) is 1. Equal lists have lag 0.
    """
    for shift in sorted(range(-MAX_LAG, MAX_LAG + 1), key=abs):
        pairs = list(zip(first[max(0, -shift) :], second[max(0, shift) :], strict=False))
        if len(pairs) >= _MIN_OVERLAP and sum(a == b for a, b in pairs) >= _LAG_SHARE * len(pairs):
            return shift
    return None
