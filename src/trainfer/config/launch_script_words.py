"""Expansion of one word of a launch script: quotes, parameters, arithmetic, braces, word splitting.

Takes the raw text of a word (its extent is the grammar's business) and gives fields as bash would
make them, without running anything: a command substitution becomes a mark. File names are never
expanded.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainfer.config.launch_script_arithmetic import evaluate
from trainfer.config.launch_script_parameters import apply_operator, split_parameter
from trainfer.config.launch_script_state import (
    MAX_WORDS,
    OutOfBudget,
    ScriptState,
    ScriptWord,
    is_marked,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_SPECIAL = "?$!-"
_NUMBERS = re.compile(r"(-?\d{1,6})\.\.(-?\d{1,6})(?:\.\.(-?\d{1,6}))?")
MAX_DEPTH = 12


@dataclass(slots=True)
class _Fields:
    """Fields under construction: the current one, and those that are done."""

    line: int
    done: list[ScriptWord] = field(default_factory=list[ScriptWord])
    text: str = ""
    quoted: bool = False
    origin: int | None = None
    is_argument: bool = False

    def add(self, text: str, *, origin: int | None = None, is_argument: bool = False) -> None:
        if self.origin is None and text:
            self.origin = self.line if origin is None else origin
            self.is_argument = is_argument
        self.text += text

    def end(self) -> None:
        if self.text or self.quoted:
            line = self.line if self.origin is None else self.origin
            self.done.append(ScriptWord(self.text, line, self.is_argument))
            if len(self.done) > MAX_WORDS:
                raise OutOfBudget(f"more than {MAX_WORDS} words")
        self.text, self.quoted, self.origin, self.is_argument = "", False, None, False


class Expander:
    """Expands words over one state."""

    def __init__(self, state: ScriptState) -> None:
        self._state = state
        self._depth = 0

    def fields(self, text: str, line: int) -> list[ScriptWord]:
        """The fields of a word, split at unquoted blanks that come from expansions."""
        found: list[ScriptWord] = []
        for piece in _braces(text):
            fields = _Fields(line=line)
            self._expand(piece, fields, quoted=False, splits=True)
            fields.end()
            found.extend(fields.done)
        return found

    def text(self, text: str, line: int) -> ScriptWord:
        """A word as one text, as in an assignment: nothing is split."""
        fields = _Fields(line=line)
        self._expand(text, fields, quoted=False, splits=False)
        joined = self._state.sized(fields.text)
        return ScriptWord(joined, line if fields.origin is None else fields.origin)

    def arithmetic(self, text: str, line: int) -> str:
        """The value of ``$(( text ))``, as text; a mark where it is not known."""
        value = self.number(text, line)
        return self._state.unknown(f"$(({text.strip()[:60]}))", line) if value is None else str(value)

    def number(self, text: str, line: int) -> int | None:
        """The value of an arithmetic expression, None where it is not known; assignments are made."""
        plain = self.inner(text, line)

        def read(name: str) -> str | None:
            value = self._state.scope.variables.get(name)
            if isinstance(value, ScriptWord):
                return None if is_marked(value.text) else value.text or "0"
            return self._state.outside.get(name) if value is None else None

        def write(name: str, result: int) -> None:
            self._state.scope.variables[name] = ScriptWord(str(result), line)

        return evaluate(plain, read, write)

    def inner(self, text: str, line: int) -> str:
        """Text inside double quotes or arithmetic: only ``$`` and backslashes act."""
        fields = _Fields(line=line)
        self._expand(text, fields, quoted=True, splits=False)
        return self._state.sized(fields.text)

    def _expand(self, text: str, fields: _Fields, *, quoted: bool, splits: bool) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise OutOfBudget("expansions are nested too deeply")
        at = 0
        while at < len(text):
            self._state.step()
            at = self._piece(text, at, fields, quoted=quoted, splits=splits)
        self._depth -= 1

    def _piece(self, text: str, at: int, fields: _Fields, *, quoted: bool, splits: bool) -> int:
        """One character, quote or expansion; gives where the next one starts."""
        char = text[at]
        if char == "\\":
            return self._backslash(text, at, fields, quoted=quoted)
        if char == "'" and not quoted:
            end = text.find("'", at + 1)
            end = len(text) if end < 0 else end
            fields.quoted = True
            fields.add(text[at + 1 : end])
            return end + 1
        if char == '"' and not quoted:
            end = closing_quote(text, at + 1)
            fields.quoted = True
            self._expand(text[at + 1 : end], fields, quoted=True, splits=splits)
            return end + 1
        if char == "`":
            end = text.find("`", at + 1)
            fields.add(self._state.unknown("a command substitution", fields.line))
            return len(text) if end < 0 else end + 1
        if char == "$":
            return self._dollar(text, at, fields, quoted=quoted, splits=splits)
        if char == "~" and not quoted and at == 0 and text[1:2] in ("", "/"):
            fields.add(self._state.outside.get("HOME", "~"))
            return at + 1
        end = at + 1
        while end < len(text) and text[end] not in "\\'\"`$":
            end += 1
        fields.add(text[at:end])
        return end

    @staticmethod
    def _backslash(text: str, at: int, fields: _Fields, *, quoted: bool) -> int:
        following = text[at + 1 : at + 2]
        if following == "\n":
            return at + 2
        if not quoted or following in ("$", "`", '"', "\\"):
            fields.quoted = fields.quoted or not quoted
            fields.add(following)
            return at + 2
        fields.add("\\")
        return at + 1

    def _dollar(self, text: str, at: int, fields: _Fields, *, quoted: bool, splits: bool) -> int:
        if text.startswith("$((", at):
            end = _closing(text, at + 1, "(", ")")
            if text[end - 1 : end + 1] == "))" and end - 1 >= at + 3:
                fields.add(self.arithmetic(text[at + 3 : end - 1], fields.line))
                return end + 1
        if text.startswith("$(", at):
            end = _closing(text, at + 1, "(", ")")
            shown = " ".join(text[at : end + 1].split())
            fields.add(self._state.unknown(shown if len(shown) <= 60 else f"{shown[:57]}...", fields.line))
            return end + 1
        if text.startswith("$'", at) and not quoted:
            end = closing_quote(text, at + 2, "'")
            fields.quoted = True
            fields.add(_ansi(text[at + 2 : end]))
            return end + 1
        if text.startswith("${", at):
            end = _closing(text, at + 1, "{", "}")
            body = text[at + 2 : end]
            joins = quoted and (body.startswith("*") or "[*]" in body)
            value = self._parameter(body, fields.line)
            self._put(value, fields, quoted=quoted, splits=splits and not joins)
            return end + 1
        return self._short(text, at, fields, quoted=quoted, splits=splits)

    def _short(self, text: str, at: int, fields: _Fields, *, quoted: bool, splits: bool) -> int:
        """``$NAME``, ``$1``, ``$@`` and the like; a lone dollar is itself."""
        match = _NAME.match(text, at + 1)
        char = text[at + 1 : at + 2]
        if match is not None:
            body, end = match.group(), match.end()
        elif char.isdigit() or (char and char in "@*#" + _SPECIAL):
            body, end = char, at + 2
        else:
            fields.add("$")
            return at + 1
        joins = quoted and body == "*"
        self._put(self._parameter(body, fields.line), fields, quoted=quoted, splits=splits and not joins)
        return end

    def _put(self, value: "Value", fields: _Fields, *, quoted: bool, splits: bool) -> None:
        """Add an expansion's result: a list keeps its words apart, a text is split unless quoted."""
        if isinstance(value, list):
            for number, word in enumerate(value):
                if number and splits:
                    fields.end()
                elif number:
                    fields.add(" ")
                fields.quoted = fields.quoted or quoted
                self._put_text(word, fields, keeps=quoted or not splits)
            return
        self._put_text(value, fields, keeps=quoted or not splits)

    def _put_text(self, value: ScriptWord, fields: _Fields, *, keeps: bool) -> None:
        text = self._state.sized(value.text)
        pieces = [text] if keeps else re.split(r"[ \t\n]+", text)
        for number, piece in enumerate(pieces):
            if number:
                fields.end()
            fields.add(piece, origin=value.line or None, is_argument=value.is_argument)

    def _parameter(self, body: str, line: int) -> "Value":
        """``${body}``: the parameter's value with its operator applied."""
        if body.startswith("!"):
            return ScriptWord(self._state.unknown(f"${{{body[:40]}}}", line), line)
        counts = len(body) > 1 and body.startswith("#")
        name, subscript, operator, operand = split_parameter(body[1:] if counts else body)
        value = self._value(name, subscript, line)
        if counts:
            return self._length(value, name, line)
        if isinstance(value, list):
            return self._of_list(value, operator, operand, line)
        if operator:
            return apply_operator(self._state, self, name, value, operator, operand, line)
        if value is None:
            return ScriptWord(self._state.unset(name, line), line)
        return value

    def _value(self, name: str, subscript: str | None, line: int) -> "Value | None":
        if name in ("@", "*"):
            return list(self._state.frame())
        if name == "#" or name in _SPECIAL or name in ("RANDOM", "SECONDS", "LINENO", "BASHPID", "PPID"):
            return ScriptWord(self._state.unknown(f"${name}", line), line)
        if name == "0" or name == "BASH_SOURCE":
            return ScriptWord(self._state.name, line)
        if name.isdigit():
            frame = self._state.frame() if self._state.frames else []
            return frame[int(name) - 1] if len(name) < 4 and 0 < int(name) <= len(frame) else None
        value = self._state.scope.variables.get(name)
        if isinstance(value, list):
            return self._element(value, subscript, line)
        if isinstance(value, dict):
            if subscript in ("@", "*"):
                return list(value.values())
            key = self.text(subscript or "0", line).text
            return (
                ScriptWord(self._state.unknown(f"${{{name}[{subscript}]}}", line), line)
                if is_marked(key)
                else value.get(key)
            )
        if value is None and name in self._state.outside:
            return ScriptWord(self._state.outside[name], 0)
        return value

    def _element(self, value: list[ScriptWord], subscript: str | None, line: int) -> "Value | None":
        if subscript in ("@", "*"):
            return list(value)
        number = 0 if subscript is None else self.number(subscript, line)
        if number is None:
            return ScriptWord(self._state.unknown(f"index [{subscript}]", line), line)
        number += len(value) if number < 0 else 0
        return value[number] if 0 <= number < len(value) else None

    def _length(self, value: "Value | None", name: str, line: int) -> ScriptWord:
        if isinstance(value, list):
            if name in ("@", "*") and not self._state.frames:
                return ScriptWord(self._state.unknown("$#", line), line)
            return ScriptWord(str(len(value)), line)
        text = "" if value is None else value.text
        return ScriptWord(
            self._state.unknown(f"${{#{name}}}", line) if is_marked(text) else str(len(text)), line
        )

    def _of_list(self, value: list[ScriptWord], operator: str, operand: str, line: int) -> "Value":
        if not operator or (operator in (":-", "-") and value) or (operator in (":+", "+") and not value):
            return value
        if operator in (":-", "-", ":+", "+"):
            return self.fields(operand, line)
        if operator == ":":
            first, _, count = operand.partition(":")
            start, length = self.number(first, line), self.number(count, line) if count else len(value)
            if start is not None and length is not None:
                return value[start:][: max(0, length)]
        return ScriptWord(self._state.unknown(f"an array with {operator}", line), line)


Value = ScriptWord | list[ScriptWord]


def closing_quote(text: str, at: int, quote: str = '"') -> int:
    """Where a quote that is open before ``at`` ends; the end of the text where it does not."""
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == quote:
            return at
        elif quote == '"' and text.startswith("$(", at):
            at = _closing(text, at + 1, "(", ")") + 1
        elif quote == '"' and text.startswith("${", at):
            at = _closing(text, at + 1, "{", "}") + 1
        else:
            at += 1
    return len(text)


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    """Where the bracket at ``at`` closes, quotes skipped; the end of the text where it does not."""
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'" and opening == "(":
            end = text.find("'", at + 1)
            at = len(text) if end < 0 else end
        elif char == '"':
            at = _plain_quote(text, at + 1)
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return len(text)


def _plain_quote(text: str, at: int) -> int:
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at


def _ansi(text: str) -> str:
    escapes = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
    return re.sub(r"\\(.)", lambda match: escapes.get(match.group(1), match.group(0)), text)


def _braces(text: str) -> Iterator[str]:
    """``{a,b}`` and ``{1..3}`` of an unquoted word, one level; anything else as it is."""
    match = re.fullmatch(r"([^{}'\"$`\\]*)\{([^{}'\"$`\\]*)\}([^{}'\"$`\\]*)", text)
    if match is None:
        yield text
        return
    before, inside, after = match.groups()
    numbers = _NUMBERS.fullmatch(inside)
    if numbers is not None:
        first, last = int(numbers.group(1)), int(numbers.group(2))
        step = abs(int(numbers.group(3) or 1)) or 1
        values = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        if len(values) > MAX_WORDS:
            raise OutOfBudget(f"{{{inside}}} is more than {MAX_WORDS} words")
        yield from (f"{before}{value}{after}" for value in values)
    elif "," in inside:
        yield from (f"{before}{part}{after}" for part in inside.split(",")[:MAX_WORDS])
    else:
        yield text
