"""Code stays readable a screen at a time: these bounds are the ceiling, not the aim (300 and 40)."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "trainfer"
FILES = sorted(SOURCE.rglob("*.py"))


def names(file: Path) -> str:
    return str(file.relative_to(SOURCE))


@pytest.mark.parametrize("file", FILES, ids=names)
def test_no_file_over_400_lines(file: Path):
    assert len(file.read_text().splitlines()) <= 400


@pytest.mark.parametrize("file", FILES, ids=names)
def test_no_function_over_60_lines(file: Path):
    long = [
        f"{file.name}:{node.lineno} {node.name}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 60
    ]
    assert long == []


@pytest.mark.parametrize("file", FILES, ids=names)
def test_every_module_says_what_it_is(file: Path):
    assert ast.get_docstring(ast.parse(file.read_text())), (
        "a module opens with what it takes, gives and leaves out"
    )


def test_run_is_one_screenful():
    assert len((SOURCE / "run.py").read_text().splitlines()) <= 150


def test_no_room_for_odds_and_ends():
    banned = {"utils", "util", "common", "helpers", "misc"}
    assert [names(file) for file in SOURCE.rglob("*") if file.stem in banned] == []
