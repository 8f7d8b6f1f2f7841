"""Conditions of a launch script: ``[ … ]``, ``[[ … ]]``, ``(( … ))``, ``test``, and lists of them.

Gives true, false, or None where the answer needs something to be run, a file to be looked at, or a
value that is not known. A variable without a value is empty here, as in bash.
"""

from collections.abc import Callable, Sequence

from tree_sitter import Node

from trainfer.config.launch_script_parameters import matches
from trainfer.config.launch_script_state import ScriptState, ScriptWord, is_marked, without_unset
from trainfer.config.launch_script_words import Expander

# fmt: off
_TAKEN_TO_SUCCEED = frozenset((
    "cat", "cd", "chmod", "conda", "cp", "echo", "export", "kill", "ln", "mkdir", "module", "mv", "pip", "pip3",
    "popd", "printf", "pushd", "python", "python3", "ray", "rm", "set", "sleep", "source", "touch", "ulimit",
    "unset", "uv", "wget", ".",
))
# fmt: on


def node_text(node: Node) -> str:
    """The source of a node."""
    return (node.text or b"").decode("utf-8", errors="replace")


def line_of(node: Node) -> int:
    """1-based line where a node starts."""
    return node.start_point[0] + 1


def succeeds(node: Node) -> bool:
    """True for commands that a script takes to succeed; their failure would end it or not matter."""
    if node.type == "redirected_statement" and node.named_children:
        return succeeds(node.named_children[0])
    if node.type != "command":
        return node.type in ("variable_assignment", "declaration_command", "unset_command")
    name = node.child_by_field_name("name")
    return name is not None and node_text(name).rsplit("/", 1)[-1] in _TAKEN_TO_SUCCEED


class Conditions:
    """Answers conditions over one state."""

    def __init__(self, state: ScriptState, expander: Expander) -> None:
        self._state, self._expander = state, expander

    def holds(self, node: Node) -> bool | None:
        """The truth of a condition as it stands in ``if``, ``while`` or ``&&``."""
        self._state.step()
        if node.type == "test_command":
            return self._test_command(node)
        if node.type == "compound_statement" and node_text(node).startswith("(("):
            number = self._expander.number(node_text(node)[2:-2], line_of(node))
            return None if number is None else number != 0
        if node.type == "negated_command":
            return _negated(self.holds(node.named_children[-1]) if node.named_children else None)
        if node.type == "list":
            return self._list(node)
        if node.type == "command":
            return self._command(node)
        return None

    def _list(self, node: Node) -> bool | None:
        operands = node.named_children
        operators = [child.type for child in node.children if child.type in ("&&", "||")]
        if len(operands) != 2 or len(operators) != 1:
            return None
        return _combined(self.holds(operands[0]), operators[0], lambda: self.holds(operands[1]))

    def _command(self, node: Node) -> bool | None:
        words: list[ScriptWord] = []
        for child in node.named_children:
            if child.type == "variable_assignment" or child.type.endswith("redirect"):
                return None
            words += self._expander.fields(node_text(child), line_of(child))
        texts = [word.text for word in words]
        if texts[:1] in (["true"], [":"]):
            return True
        if texts[:1] == ["false"]:
            return False
        if texts[:1] in (["test"], ["["]):
            return self._words(texts[1:-1] if texts[0] == "[" else texts[1:])
        return None

    def _words(self, words: Sequence[str]) -> bool | None:
        """Arguments of ``test``: one to four words."""
        if words[:1] == ["!"]:
            return _negated(self._words(words[1:]))
        if len(words) == 1:
            return None if is_marked(without_unset(words[0])) else bool(without_unset(words[0]))
        if len(words) == 2:
            return self._unary(words[0], words[1])
        if len(words) == 3:
            return self._binary(words[0], words[1], words[2], is_pattern=False, line=0)
        return None

    def _test_command(self, node: Node) -> bool | None:
        inside = node.named_children
        if node_text(node).startswith("(("):
            number = self._expander.number(node_text(node)[2:-2], line_of(node))
            return None if number is None else number != 0
        if len(inside) == 1:
            return self._expression(inside[0], is_double=node_text(node).startswith("[["))
        return None

    def _expression(self, node: Node, *, is_double: bool) -> bool | None:
        self._state.step()
        children = node.named_children
        if node.type == "parenthesized_expression" and len(children) == 1:
            return self._expression(children[0], is_double=is_double)
        if node.type == "unary_expression" and children:
            operator = node_text(node.children[0])
            if operator == "!":
                return _negated(self._expression(children[-1], is_double=is_double))
            return self._unary(operator, self._plain(children[-1]))
        if node.type == "binary_expression":
            return self._binary_node(node, is_double=is_double)
        if node.type in (
            "word",
            "string",
            "raw_string",
            "simple_expansion",
            "expansion",
            "concatenation",
            "number",
        ):
            text = self._plain(node)
            return None if is_marked(text) else bool(text)
        return None

    def _binary_node(self, node: Node, *, is_double: bool) -> bool | None:
        if len(node.children) < 3:
            return None
        left, operator, right = node.children[0], node_text(node.children[1]), node.children[-1]
        if operator in ("&&", "-a", "||", "-o"):
            first = self._expression(left, is_double=is_double)
            return _combined(
                first,
                "&&" if operator in ("&&", "-a") else "||",
                lambda: self._expression(right, is_double=is_double),
            )
        is_pattern = is_double and right.type not in ("string", "raw_string")
        return self._binary(
            self._plain(left), operator, self._plain(right), is_pattern=is_pattern, line=line_of(node)
        )

    def _plain(self, node: Node) -> str:
        """The node's text expanded, without the marks of variables that have no value."""
        return without_unset(self._expander.text(node_text(node), line_of(node)).text)

    def _unary(self, operator: str, text: str) -> bool | None:
        text = without_unset(text)
        if operator == "-v":
            return (
                None
                if is_marked(text)
                else text in self._state.scope.variables or text in self._state.outside
            )
        if is_marked(text) or operator not in ("-z", "-n"):
            return None
        return (not text) == (operator == "-z")

    def _binary(self, left: str, operator: str, right: str, *, is_pattern: bool, line: int) -> bool | None:
        left, right = without_unset(left), without_unset(right)
        if is_marked(left) or is_marked(right):
            return None
        if operator in ("=", "==", "!="):
            if len(left) * len(right) > 1_000_000:
                return None
            equal = matches(left, right) if is_pattern else left == right
            return equal == (operator != "!=")
        if operator in ("<", ">"):
            return left < right if operator == "<" else left > right
        return self._numbers(left, operator, right, line)

    def _numbers(self, left: str, operator: str, right: str, line: int) -> bool | None:
        a, b = self._expander.number(left, line), self._expander.number(right, line)
        if a is None or b is None:
            return None
        compared: dict[str, bool] = {
            "-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b,
        }  # fmt: skip
        return compared.get(operator)


def _negated(truth: bool | None) -> bool | None:  # noqa: FBT001 - a truth value is what it takes
    return None if truth is None else not truth


def _combined(
    first: bool | None,  # noqa: FBT001 - a truth value is what it takes
    operator: str,
    second: Callable[[], bool | None],
) -> bool | None:
    """``first && second`` or ``first || second``; the second is asked only where it matters."""
    decisive = operator == "||"
    if first is decisive:
        return decisive
    other = second()
    if first is None:
        return decisive if other is decisive else None
    return other
