"""``${NAME…}``: taking the body apart, and the operators on a value (defaults, cutting, replacing, case)."""

import re
from typing import Protocol

from trainfer.config.launch_script_state import ScriptState, ScriptWord, is_marked, without_unset


class Expander(Protocol):
    """What the operators need of the expansion of words."""

    def text(self, text: str, line: int) -> ScriptWord:
        """A word as one text."""
        ...

    def number(self, text: str, line: int) -> int | None:
        """The value of an arithmetic expression."""
        ...


_HEAD = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(\[)?")
_OPERATORS = (
    ":-",
    ":=",
    ":?",
    ":+",
    "##",
    "%%",
    "//",
    "/#",
    "/%",
    "^^",
    ",,",
    "-",
    "=",
    "?",
    "+",
    "#",
    "%",
    "/",
    "^",
    ",",
    ":",
    "@",
)
MAX_PATTERN = 256
MAX_WORK = 500_000
"""Characters squared times pattern: what cutting a start or an end may cost."""


def split_parameter(body: str) -> tuple[str, str | None, str, str]:
    """``NAME[SUB]OPERATOR OPERAND`` in its four parts; no subscript is None, no operator is empty."""
    match = _HEAD.match(body)
    if match is None:
        return body, None, "", ""
    name, rest, subscript = match.group(1), body[match.end() :], None
    if match.group(2):
        subscript, closed, rest = rest.partition("]")
        if not closed:
            rest = ""
    for operator in _OPERATORS:
        if rest.startswith(operator):
            return name, subscript, operator, rest[len(operator) :]
    return name, subscript, "", ""


def apply_operator(
    state: ScriptState,
    expander: Expander,
    name: str,
    value: ScriptWord | None,
    operator: str,
    operand: str,
    line: int,
) -> ScriptWord:
    """The value of ``${name operator operand}``."""
    if operator in (":-", "-", ":=", "=", ":?", "?", ":+", "+"):
        return _default(state, expander, name, value, operator, operand, line)
    if value is None:
        return ScriptWord(state.unset(name, line), line)
    pattern = expander.text(operand, line).text if operator in ("#", "##", "%", "%%") else operand
    if is_marked(value.text) or is_marked(pattern) or len(pattern) > MAX_PATTERN or operator == "@":
        return ScriptWord(state.unknown(f"${{{name}{operator}…}}", line), line)
    text = _changed(expander, value.text, operator, pattern, line)
    if text is None:
        return ScriptWord(state.unknown(f"${{{name}{operator}…}}", line), line)
    return ScriptWord(state.sized(text), value.line)


def _default(
    state: ScriptState,
    expander: Expander,
    name: str,
    value: ScriptWord | None,
    operator: str,
    operand: str,
    line: int,
) -> ScriptWord:
    """Defaults: with a colon an empty value counts as none."""
    unset = value is None or (not without_unset(value.text) and (operator[0] == ":" or bool(value.text)))
    if operator[-1] == "+":
        if value is not None and is_marked(value.text) and not unset:
            return ScriptWord(state.unknown(f"${{{name}{operator}…}}", line), line)
        return ScriptWord("", line) if unset else expander.text(operand, line)
    if not unset and value is not None:
        return value
    if operator[-1] == "?":
        return ScriptWord(state.unset(name, line), line)
    result = expander.text(operand, line)
    if operator[-1] == "=":
        state.scope.variables[name] = result
    return result


def _changed(expander: Expander, text: str, operator: str, pattern: str, line: int) -> str | None:
    if operator in ("#", "##"):
        return _cut_start(text, pattern, longest=operator == "##")
    if operator in ("%", "%%"):
        return _cut_end(text, pattern, longest=operator == "%%")
    if operator[0] == "/":
        return _replaced(expander, text, operator, pattern, line)
    if operator == ":":
        first, _, count = pattern.partition(":")
        start, length = expander.number(first, line), expander.number(count, line) if count else len(text)
        if start is None or length is None:
            return None
        rest = text[start:]
        return rest[:length] if length >= 0 else rest[: len(rest) + length]
    if pattern:
        return None
    changed = str.upper if operator[0] == "^" else str.lower
    return changed(text) if len(operator) == 2 else changed(text[:1]) + text[1:]


def matches(text: str, pattern: str) -> bool:
    """Whether a bash pattern matches the whole text; steps are at most their product."""
    tokens = _tokens(pattern)
    at, token, star, resume = 0, 0, -1, 0
    while at < len(text):
        if token < len(tokens) and tokens[token] == "*":
            star, resume = token, at
            token += 1
        elif token < len(tokens) and _fits(text[at], tokens[token]):
            at, token = at + 1, token + 1
        elif star >= 0:
            resume += 1
            at, token = resume, star + 1
        else:
            return False
    return all(rest == "*" for rest in tokens[token:])


def _tokens(pattern: str) -> list[str]:
    """``*``, ``?``, ``[…]`` as they are; any other character behind a backslash."""
    found: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        end = pattern.find("]", at + 2) if char == "[" else -1
        if char == "\\" and at + 1 < len(pattern):
            found.append("\\" + pattern[at + 1])
            at += 1
        elif char in "*?":
            found.append(char)
        elif end > 0:
            found.append(pattern[at : end + 1])
            at = end
        else:
            found.append("\\" + char)
        at += 1
    return found


def _fits(char: str, token: str) -> bool:
    if token == "?":
        return True
    if token[0] == "\\":
        return char == token[1]
    inside = token[1:-1]
    negated = inside[0] in "!^"
    inside = inside[1:] if negated else inside
    found, at = False, 0
    while at < len(inside):
        if at + 2 < len(inside) and inside[at + 1] == "-":
            found = found or inside[at] <= char <= inside[at + 2]
            at += 3
        else:
            found = found or inside[at] == char
            at += 1
    return found != negated


def _cut_start(text: str, pattern: str, *, longest: bool) -> str | None:
    if len(text) ** 2 * len(pattern) > MAX_WORK:
        return None
    ends = range(len(text), -1, -1) if longest else range(len(text) + 1)
    return next((text[end:] for end in ends if matches(text[:end], pattern)), text)


def _cut_end(text: str, pattern: str, *, longest: bool) -> str | None:
    if len(text) ** 2 * len(pattern) > MAX_WORK:
        return None
    starts = range(len(text) + 1) if longest else range(len(text), -1, -1)
    return next((text[:start] for start in starts if matches(text[start:], pattern)), text)


def _replaced(expander: Expander, text: str, operator: str, operand: str, line: int) -> str | None:
    """``${X/a/b}`` for plain texts only; a pattern with wildcards is not known."""
    search, _, replacement = operand.partition("/")
    search, replacement = expander.text(search, line).text, expander.text(replacement, line).text
    if is_marked(search + replacement) or not search or any(char in search for char in "*?["):
        return None
    if operator == "/#":
        return replacement + text[len(search) :] if text.startswith(search) else text
    if operator == "/%":
        return text[: -len(search)] + replacement if text.endswith(search) else text
    return text.replace(search, replacement, -1 if operator == "//" else 1)
