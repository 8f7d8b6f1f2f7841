"""``$(( … ))``: bash's whole-number arithmetic on text whose parameters are already expanded.

Gives a number, or None where a name has no number or the text is not understood. Values wrap at
64 bits as in bash. Assignments go through the callbacks.
"""

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+#\w+|\d+)|([A-Za-z_]\w*)|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))"
)
_BINARY: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"),
    ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
MAX_TOKENS = 500
MAX_DEPTH = 20


class NotArithmetic(Exception):
    """The text has no value that can be known."""


def evaluate(text: str, read: Callable[[str], str | None], write: Callable[[str, int], None]) -> int | None:
    """The value of ``text``; ``read`` gives a variable's text, ``write`` takes assignments."""
    try:
        return _Parser(text, read, write, depth=0).value()
    except NotArithmetic:
        return None


def _wrap(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


class _Parser:
    def __init__(
        self, text: str, read: Callable[[str], str | None], write: Callable[[str, int], None], *, depth: int
    ) -> None:
        if depth > 8:
            raise NotArithmetic("names refer to one another too deeply")
        self._tokens = _tokens(text)
        self._at = 0
        self._read, self._write, self._depth = read, write, depth
        self._nested = 0
        self._dead = 0
        """Above 0 in a part that short-circuit evaluation skips: nothing is assigned there."""

    def value(self) -> int:
        if not self._tokens:
            return 0
        result = self._comma()
        if self._at != len(self._tokens):
            raise NotArithmetic("something is left over")
        return result

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, token: str) -> bool:
        if self._peek() == token:
            self._at += 1
            return True
        return False

    def _comma(self) -> int:
        result = self._ternary()
        while self._take(","):
            result = self._ternary()
        return result

    def _ternary(self) -> int:
        self._nested += 1
        if self._nested > MAX_DEPTH:
            raise NotArithmetic("nested too deeply")
        condition = self._binary(0)
        if self._take("?"):
            yes = self._skipping(not condition)
            if not self._take(":"):
                raise NotArithmetic("? without :")
            no = self._skipping(bool(condition))
            condition = yes if condition else no
        self._nested -= 1
        return condition

    def _skipping(self, skipped: bool) -> int:  # noqa: FBT001 - private, and called with a comparison
        self._dead += skipped
        result = self._ternary()
        self._dead -= skipped
        return result

    def _binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self._power()
        left = self._binary(level + 1)
        while self._peek() in _BINARY[level]:
            operator = self._tokens[self._at]
            self._at += 1
            skipped = (operator == "&&" and not left) or (operator == "||" and bool(left))
            self._dead += skipped
            right = self._binary(level + 1)
            self._dead -= skipped
            left = self._apply(operator, left, right)
        return left

    def _power(self) -> int:
        base = self._unary()
        if not self._take("**"):
            return base
        exponent = self._power()
        if not 0 <= exponent <= 64:
            raise NotArithmetic("an exponent out of range")
        return _wrap(base**exponent)

    def _unary(self) -> int:
        for operator, function in _UNARY.items():
            if self._take(operator):
                self._nested += 1
                if self._nested > MAX_DEPTH:
                    raise NotArithmetic("nested too deeply")
                result = _wrap(function(self._unary()))
                self._nested -= 1
                return result
        for operator, change in (("++", 1), ("--", -1)):
            if self._take(operator):
                return self._assign(self._name(), lambda old, by=change: old + by)
        return self._atom()

    def _name(self) -> str:
        name = self._peek()
        if not name.isidentifier():
            raise NotArithmetic("a name is missing")
        self._at += 1
        return name

    def _atom(self) -> int:
        if self._take("("):
            result = self._comma()
            if not self._take(")"):
                raise NotArithmetic("( without )")
            return result
        token = self._peek()
        if token.isidentifier():
            self._at += 1
            return self._variable(token)
        self._at += 1
        return _number(token)

    def _variable(self, name: str) -> int:
        operator = self._peek()
        if operator in ("++", "--"):
            self._at += 1
            change = 1 if operator == "++" else -1
            return self._assign(name, lambda old: old + change) - change
        if operator == "=" or (len(operator) == 2 and operator[1] == "=" and operator[0] in "+-*/%&|^"):
            self._at += 1
            right = self._ternary()
            if operator == "=":
                return self._assign(name, lambda _: right, reads=False)
            return self._assign(name, lambda old: self._apply(operator[0], old, right))
        return self._value_of(name)

    def _value_of(self, name: str) -> int:
        text = self._read(name)
        if text is None:
            raise NotArithmetic(f"{name} has no number")
        if re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text):
            return int(text)
        return _Parser(text, self._read, self._write, depth=self._depth + 1).value()

    def _assign(self, name: str, change: Callable[[int], int], *, reads: bool = True) -> int:
        result = _wrap(change(self._value_of(name) if reads else 0))
        if not self._dead:
            self._write(name, result)
        return result

    def _apply(self, operator: str, left: int, right: int) -> int:
        if operator in ("/", "%"):
            if right == 0:
                if self._dead:
                    return 0
                raise NotArithmetic("division by zero")
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if operator == "/" else left - quotient * right
        if operator in ("<<", ">>") and not 0 <= right < 64:
            raise NotArithmetic("a shift out of range")
        return _wrap(_OPERATORS[operator](left, right))


_UNARY: dict[str, Callable[[int], int]] = {
    "-": lambda x: -x,
    "+": lambda x: x,
    "!": lambda x: int(not x),
    "~": lambda x: ~x,
}
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a) or bool(b)),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(found) >= MAX_TOKENS:
            raise NotArithmetic("not understood")
        found.append(match.group(match.lastindex or 0))
        at = match.end()
    return found


def _number(token: str) -> int:
    try:
        if "#" in token:
            base, digits = token.split("#", 1)
            return _wrap(int(digits, int(base)))
        if token[:2].lower() == "0x":
            return _wrap(int(token, 16))
        if len(token) > 1 and token.startswith("0"):
            return _wrap(int(token, 8))
        if len(token) > 19:
            raise NotArithmetic("a number out of range")
        return _wrap(int(token))
    except ValueError:
        raise NotArithmetic("a number is missing") from None
