"""Assignments and declarations of a launch script: texts, arrays, keyed arrays, exports."""

import re

from tree_sitter import Node

from trainfer.config.launch_script_conditions import line_of, node_text
from trainfer.config.launch_script_state import (
    MAX_WORDS,
    OutOfBudget,
    ScriptState,
    ScriptWord,
    Variable,
    without_unset,
)
from trainfer.config.launch_script_words import Expander


class Assignments:
    """Carries out assignments on one state."""

    def __init__(self, state: ScriptState, expander: Expander) -> None:
        self._state, self._expander = state, expander

    def assign(self, node: Node) -> None:
        """``NAME=value``, ``NAME+=value``, ``NAME[i]=value``."""
        assigned = self.value_of(node)
        if assigned is not None:
            self._state.scope.variables[assigned[0]] = assigned[1]

    def value_of(self, node: Node) -> tuple[str, Variable] | None:
        """Name and new value of an assignment; None where its left side is not understood."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return None
        appends = any(child.type == "+=" for child in node.children)
        if target.type == "subscript":
            return self._element(node, target, value)
        name = node_text(target)
        old = self._state.scope.variables.get(name)
        if value is not None and value.type == "array":
            new = self._array(value)
            return name, ([*_as_list(old), *new] if appends and isinstance(new, list) else new)
        line = line_of(node)
        text = (
            self._expander.text(node_text(value), line_of(value))
            if value is not None
            else ScriptWord("", line)
        )
        if not appends:
            return name, ScriptWord(text.text, line)
        if isinstance(old, list):
            return name, [*old, text]
        before = old.text if isinstance(old, ScriptWord) else self._state.outside.get(name, "")
        return name, ScriptWord(self._state.sized(without_unset(before) + text.text), line)

    def _element(self, node: Node, target: Node, value: Node | None) -> tuple[str, Variable] | None:
        name, _, subscript = node_text(target).partition("[")
        text = (
            self._expander.text(node_text(value), line_of(value)) if value is not None else ScriptWord("", 0)
        )
        word = ScriptWord(text.text, line_of(node))
        old, subscript = self._state.scope.variables.get(name), subscript.rstrip("]")
        if isinstance(old, dict):
            return name, {**old, self._expander.text(subscript, line_of(node)).text: word}
        number, elements = self._expander.number(subscript, line_of(node)), _as_list(old)
        if number is None or not 0 <= number <= min(len(elements), MAX_WORDS):
            self._state.note(line_of(node), f"{name}[{subscript[:40]}]= is not followed")
            return None
        return name, [*elements[:number], word, *elements[number + 1 :]]

    def _array(self, node: Node) -> list[ScriptWord] | dict[str, ScriptWord]:
        words: list[ScriptWord] = []
        keyed: dict[str, ScriptWord] = {}
        for child in node.named_children:
            if child.type == "comment":
                continue
            match = re.match(r"\[([^\]]+)\]=(.*)", node_text(child), re.DOTALL)
            if match is not None:
                value = self._expander.text(match.group(2), line_of(child))
                keyed[self._expander.text(match.group(1), line_of(child)).text] = value
            else:
                words += self._expander.fields(node_text(child), line_of(child))
            if len(words) > MAX_WORDS:
                raise OutOfBudget(f"an array of more than {MAX_WORDS} words")
        return keyed or words

    def declare(self, node: Node) -> None:
        """``export``, ``declare``, ``local``, ``readonly``."""
        exports = node_text(node).split(None, 1)[0] == "export"
        options = [node_text(child) for child in node.named_children if child.type == "word"]
        exports = exports or any(option.startswith("-") and "x" in option for option in options)
        for child in node.named_children:
            if child.type == "variable_assignment":
                assigned = self.value_of(child)
                if assigned is None:
                    continue
                name, value = assigned
                self._state.scope.variables[name] = value
            elif child.type == "variable_name":
                name = node_text(child)
                if any("A" in option for option in options):
                    self._state.scope.variables.setdefault(name, {})
                elif any("a" in option for option in options):
                    self._state.scope.variables.setdefault(name, [])
            else:
                continue
            if exports:
                self._state.scope.exported.add(name)

    def unset(self, node: Node) -> None:
        """``unset NAME``."""
        for child in node.named_children:
            self._state.scope.variables.pop(node_text(child), None)
            self._state.outside.pop(node_text(child), None)


def _as_list(value: Variable | None) -> list[ScriptWord]:
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, ScriptWord) else []
