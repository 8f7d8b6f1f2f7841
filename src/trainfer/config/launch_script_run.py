"""Walks the statements of a launch script and collects the commands that it would run, without running any.

Assignments, tests on known values, loops over known words and plain functions are followed; a
condition that is not known follows both branches, and what they leave different is not known
afterwards. Everything else is noted with its line.
"""

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tree_sitter import Node

from trainfer.config.launch_script_assign import Assignments
from trainfer.config.launch_script_conditions import Conditions, line_of, node_text, succeeds
from trainfer.config.launch_script_parameters import matches
from trainfer.config.launch_script_state import (
    MAX_WORDS,
    OutOfBudget,
    ScriptState,
    ScriptWord,
    is_marked,
    merged,
    without_unset,
)
from trainfer.config.launch_script_words import Expander

MAX_LOOPS = 300
MAX_CALLS = 8


class Flow(enum.Enum):
    """How a statement ended."""

    ON = enum.auto()
    EXIT = enum.auto()
    RETURN = enum.auto()
    BREAK = enum.auto()
    CONTINUE = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class SimpleCommand:
    """A command that would run: its words and its environment."""

    words: tuple[ScriptWord, ...]
    line: int
    environment: dict[str, str]
    is_certain: bool
    """False below a condition that is not known."""


class Runner:
    """Follows statements over one state."""

    def __init__(self, state: ScriptState, parse: Callable[[bytes], Node]) -> None:
        self.commands: list[SimpleCommand] = []
        self._state = state
        self._parse = parse
        self._expander = Expander(state)
        self._conditions = Conditions(state, self._expander)
        self._assignments = Assignments(state, self._expander)
        self._functions: dict[str, Node] = {}
        self._unsure = 0
        self._nested = 0

    def run(self, node: Node) -> Flow:
        """Follow one statement."""
        self._state.step()
        handler = self._handlers().get(node.type)
        if handler is not None:
            return handler(node)
        if node.type in ("program", "compound_statement", "subshell", "do_group", "else_clause", "ERROR"):
            if node.type == "ERROR":
                self._state.note(line_of(node), "not understood as bash")
            if node_text(node).startswith("(("):
                self._expander.number(node_text(node)[2:-2], line_of(node))
                return Flow.ON
            return self._sequence(node.named_children)
        return Flow.ON

    def _handlers(self) -> dict[str, Callable[[Node], Flow]]:
        return {
            "variable_assignment": self._assignment,
            "variable_assignments": lambda node: self._sequence(node.named_children),
            "declaration_command": self._declaration,
            "unset_command": self._unset,
            "command": self._command,
            "redirected_statement": self._redirected,
            "pipeline": lambda node: self._sequence(node.named_children),
            "negated_command": lambda node: self._sequence(node.named_children),
            "list": self._list,
            "if_statement": self._if,
            "case_statement": self._case,
            "for_statement": self._for,
            "c_style_for_statement": self._c_style_for,
            "while_statement": self._while,
            "function_definition": self._function,
        }

    def _sequence(self, nodes: Sequence[Node]) -> Flow:
        for node in nodes:
            flow = self.run(node)
            if flow is not Flow.ON:
                return flow
        return Flow.ON

    def _redirected(self, node: Node) -> Flow:
        body = node.child_by_field_name("body")
        return self.run(body) if body is not None else Flow.ON

    def _assignment(self, node: Node) -> Flow:
        self._assignments.assign(node)
        return Flow.ON

    def _declaration(self, node: Node) -> Flow:
        self._assignments.declare(node)
        return Flow.ON

    def _unset(self, node: Node) -> Flow:
        self._assignments.unset(node)
        return Flow.ON

    def _command(self, node: Node) -> Flow:
        prefix: dict[str, str] = {}
        words: list[ScriptWord] = []
        for child in node.named_children:
            if child.type == "variable_assignment" and not words:
                assigned = self._assignments.value_of(child)
                if assigned is not None and isinstance(assigned[1], ScriptWord):
                    prefix[assigned[0]] = assigned[1].text
            elif not child.type.endswith("redirect") and child.type != "comment":
                words += self._expander.fields(node_text(child), line_of(child))
            if len(words) > MAX_WORDS:
                raise OutOfBudget(f"a command of more than {MAX_WORDS} words")
        if not words:
            return Flow.ON
        return self._run_words(words, prefix, line_of(node))

    def _run_words(self, words: list[ScriptWord], prefix: dict[str, str], line: int) -> Flow:
        name = words[0].text
        ends = {"exit": Flow.EXIT, "return": Flow.RETURN, "break": Flow.BREAK, "continue": Flow.CONTINUE}
        if name in ends:
            return ends[name]
        if name in self._functions:
            return self._call(self._functions[name], words[1:], line)
        if name == "let":
            for word in words[1:]:
                self._expander.number(word.text, line)
        elif name in ("source", "."):
            self._state.note(
                line, f"{' '.join(word.text for word in words[:2])} is not read".replace("\0", "?")
            )
        elif name == "read":
            for word in words[1:]:
                if word.text.isidentifier():
                    self._state.scope.variables[word.text] = ScriptWord(
                        self._state.unknown("read", line), line
                    )
        elif name == "eval":
            return self._nested_script(" ".join(word.text for word in words[1:]), line)
        else:
            self._keep(words, prefix, line)
        return Flow.ON

    def _keep(self, words: list[ScriptWord], prefix: dict[str, str], line: int) -> None:
        known = {name: text for name, text in prefix.items() if not is_marked(text)}
        self.commands.append(
            SimpleCommand(
                words=tuple(words),
                line=line,
                environment={**self._state.environment(), **known},
                is_certain=not self._unsure,
            )
        )
        for position, word in enumerate(words[:-2]):
            if word.text.rsplit("/", 1)[-1] in ("bash", "sh") and re.fullmatch(
                r"-\w*c", words[position + 1].text
            ):
                self._nested_script(words[position + 2].text, line)

    def _nested_script(self, text: str, line: int) -> Flow:
        """``eval`` and ``bash -c``: the text is read as a script of its own, at most three deep."""
        if self._nested >= 3 or "\0" in text:
            self._state.note(line, "a command inside a text is not followed")
            return Flow.ON
        self._nested += 1
        before = len(self.commands)
        flow = self.run(self._parse(text.encode()))
        self._nested -= 1
        for position, command in enumerate(self.commands[before:], start=before):
            words = tuple(ScriptWord(word.text, line, word.is_argument) for word in command.words)
            self.commands[position] = SimpleCommand(
                words=words, line=line, environment=command.environment, is_certain=command.is_certain
            )
        return Flow.EXIT if flow is Flow.EXIT else Flow.ON

    def _function(self, node: Node) -> Flow:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self._functions[node_text(name)] = body
        return Flow.ON

    def _call(self, body: Node, arguments: list[ScriptWord], line: int) -> Flow:
        if len(self._state.frames) >= MAX_CALLS:
            self._state.note(line, "functions call one another too deeply to be followed")
            return Flow.ON
        self._state.frames.append(arguments)
        flow = self.run(body)
        self._state.frames.pop()
        return flow if flow is Flow.EXIT else Flow.ON

    def _list(self, node: Node) -> Flow:
        operands = node.named_children
        operators = [child.type for child in node.children if child.type in ("&&", "||")]
        if len(operands) != 2 or len(operators) != 1:
            return self._sequence(operands)
        truth = self._conditions.holds(operands[0])
        flow = Flow.ON if operands[0].type == "test_command" else self.run(operands[0])
        if flow is not Flow.ON:
            return flow
        if truth is None and not succeeds(operands[0]):
            return self._maybe(lambda: self.run(operands[1]), operands[0])
        goes_on = truth is not False if operators[0] == "&&" else truth is False
        return self.run(operands[1]) if goes_on else Flow.ON

    def _if(self, node: Node) -> Flow:
        condition = node.child_by_field_name("condition")
        tail = [child for child in node.named_children if child.type in ("elif_clause", "else_clause")]
        body = _body(node, tail)
        return self._branch(condition, body, tail)

    def _branch(self, condition: Node | None, body: Sequence[Node], tail: Sequence[Node]) -> Flow:
        truth = None if condition is None else self._conditions.holds(condition)
        if truth is True:
            return self._sequence(body)
        if truth is False:
            return self._otherwise(tail)
        return self._both(lambda: self._sequence(body), lambda: self._otherwise(tail), condition)

    def _otherwise(self, tail: Sequence[Node]) -> Flow:
        if not tail:
            return Flow.ON
        first = tail[0]
        if first.type == "else_clause":
            return self._sequence(first.named_children)
        condition = next(iter(first.named_children), None)
        return self._branch(condition, first.named_children[1:], tail[1:])

    def _maybe(self, then: Callable[[], Flow], condition: Node | None) -> Flow:
        return self._both(then, lambda: Flow.ON, condition)

    def _both(self, then: Callable[[], Flow], otherwise: Callable[[], Flow], condition: Node | None) -> Flow:
        """Follow both branches; only where both leave does the script leave."""
        line = 0 if condition is None else line_of(condition)
        shown = "" if condition is None else " ".join(node_text(condition).split())[:60]
        before = self._state.scope
        self._unsure += 1
        self._state.scope = before.copied()
        first_flow = then()
        first = self._state.scope
        self._state.scope = before.copied()
        second_flow = otherwise()
        second = self._state.scope
        self._unsure -= 1
        if first_flow is not Flow.ON and second_flow is not Flow.ON:
            return first_flow
        if first_flow is not Flow.ON or second_flow is not Flow.ON:
            self._state.scope = second if first_flow is not Flow.ON else first
        else:
            self._state.scope = merged(
                first, second, self._state.unknown(f"a value that depends on {shown}", line), line
            )
        return Flow.ON

    def _case(self, node: Node) -> Flow:
        value = node.child_by_field_name("value")
        items = [child for child in node.named_children if child.type == "case_item"]
        if value is None:
            return Flow.ON
        text = without_unset(self._expander.text(node_text(value), line_of(value)).text)
        return self._case_items(text, items, value)

    def _case_items(self, text: str, items: Sequence[Node], value: Node) -> Flow:
        if not items:
            return Flow.ON
        patterns, body = _case_item(items[0])
        chosen: bool | None = None if is_marked(text) else False
        for pattern in patterns:
            expanded = self._expander.text(pattern, line_of(items[0])).text
            if expanded == "*":
                chosen = True
            elif chosen is False and (is_marked(expanded) or len(expanded) * len(text) > 1_000_000):
                chosen = None
            elif chosen is False and matches(text, expanded):
                chosen = True
        if chosen is True:
            return self._sequence(body)
        if chosen is False:
            return self._case_items(text, items[1:], value)
        return self._both(
            lambda: self._sequence(body), lambda: self._case_items(text, items[1:], value), value
        )

    def _for(self, node: Node) -> Flow:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is None or body is None:
            return Flow.ON
        words: list[ScriptWord] = []
        for child in node.named_children:
            if child not in (variable, body):
                words += self._expander.fields(node_text(child), line_of(child))
        if any(is_marked(word.text) for word in words):
            self._state.note(line_of(node), "a loop over words that are not known is followed once")
            words = words[:1]
        for count, word in enumerate(words):
            if count >= MAX_LOOPS:
                raise OutOfBudget(f"a loop of more than {MAX_LOOPS} turns")
            self._state.scope.variables[node_text(variable)] = word
            flow = self.run(body)
            if flow in (Flow.EXIT, Flow.RETURN):
                return flow
            if flow is Flow.BREAK:
                break
        return Flow.ON

    def _c_style_for(self, node: Node) -> Flow:
        header = re.match(r"for\s*\(\((.*?);(.*?);(.*?)\)\)", node_text(node), re.DOTALL)
        body = node.child_by_field_name("body")
        if header is None or body is None:
            return Flow.ON
        start, condition, change = header.groups()
        self._expander.number(start, line_of(node))

        def holds() -> bool | None:
            number = self._expander.number(condition or "1", line_of(node))
            return None if number is None else number != 0

        return self._loop(holds, lambda: self._expander.number(change, line_of(node)), body)

    def _while(self, node: Node) -> Flow:
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        if condition is None or body is None:
            return Flow.ON
        until = node_text(node).startswith("until")

        def holds() -> bool | None:
            truth = self._conditions.holds(condition)
            return truth if truth is None or not until else not truth

        if holds() is None:
            self._state.note(line_of(node), "a loop whose condition is not known is followed once")
            return self._maybe(lambda: Flow.ON if self.run(body) is not Flow.EXIT else Flow.EXIT, condition)
        return self._loop(holds, lambda: None, body)

    def _loop(self, holds: Callable[[], bool | None], after: Callable[[], object], body: Node) -> Flow:
        for _ in range(MAX_LOOPS):
            if holds() is not True:
                return Flow.ON
            flow = self.run(body)
            if flow in (Flow.EXIT, Flow.RETURN):
                return flow
            if flow is Flow.BREAK:
                return Flow.ON
            after()
        raise OutOfBudget(f"a loop of more than {MAX_LOOPS} turns")


def _body(node: Node, tail: Sequence[Node]) -> list[Node]:
    """Statements between ``then`` and the first ``elif``, ``else`` or ``fi``."""
    seen_then, body = False, list[Node]()
    for child in node.children:
        if child.type == "then":
            seen_then = True
        elif child in tail:
            break
        elif seen_then and child.is_named:
            body.append(child)
    return body


def _case_item(node: Node) -> tuple[list[str], list[Node]]:
    """Patterns before the bracket, statements after it."""
    patterns, body, inside = list[str](), list[Node](), False
    for child in node.children:
        if child.type == ")" and not inside:
            inside = True
        elif child.is_named:
            if inside:
                body.append(child)
            else:
                patterns.append(node_text(child))
    return patterns, body
