"""Hooks after import, advice around functions, and nothing at all where nothing was asked for."""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainfer.integrations.verl.after_import import watch
from trainfer.integrations.verl.wrapping import Call, wrap

_ALONE = """
import json, os, sys
before, finders = set(sys.modules), list(sys.meta_path)
import trainfer.integrations.verl.plugin
print(json.dumps({"new": sorted(set(sys.modules) - before), "finders": sys.meta_path == finders}))
"""


def test_without_the_variable_the_plugin_imports_nothing_and_hooks_nothing(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRAINFER_ATTACH"}
    answer = subprocess.run(
        [sys.executable, "-c", _ALONE],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    found = json.loads(answer.stdout)
    assert found["finders"]
    foreign = [name for name in found["new"] if name.partition(".")[0] not in sys.stdlib_module_names]
    assert set(foreign) == {
        "trainfer",
        "trainfer.integrations",
        "trainfer.integrations.verl",
        "trainfer.integrations.verl.plugin",
    }
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_variable_costs_one_line_and_not_the_run(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-c", "import trainfer.integrations.verl.plugin; print('on')"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRAINFER_ATTACH": "{broken"},
        cwd=tmp_path,
    )
    assert answer.stdout.strip() == "on"
    assert "TRAINFER_ATTACH" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.fixture
def finders():
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before


@pytest.mark.usefixtures("finders")
def test_a_module_is_called_back_about_after_its_execution_and_is_otherwise_untouched(tmp_path, monkeypatch):
    (tmp_path / "late_target.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    watch(frozenset({"late_target"}), lambda module: seen.append((module.__name__, module.value)))
    assert seen == []
    module = importlib.import_module("late_target")
    assert seen == [("late_target", 1)]
    assert Path(module.__file__).name == "late_target.py"
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    del sys.modules["late_target"]


@pytest.mark.usefixtures("finders")
def test_two_that_watch_one_module_are_both_called_back_about(tmp_path, monkeypatch):
    (tmp_path / "watched_twice.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    watch(frozenset({"watched_twice"}), lambda module: seen.append(("first", module.value)))
    watch(frozenset({"watched_twice"}), lambda module: seen.append(("second", module.value)))
    module = importlib.import_module("watched_twice")
    assert seen == [("first", 1), ("second", 1)]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    del sys.modules["watched_twice"]


@pytest.mark.usefixtures("finders")
def test_a_module_that_is_there_already_is_called_back_about_at_once():
    seen = []
    watch(frozenset({"json"}), lambda module: seen.append(module))
    assert seen == [json]


def test_advice_sees_arguments_by_name_and_the_result_and_may_change_both_sides():
    told, seen = [], []

    def double(x, *, y=1):
        return x * 2 + y

    double.mark = "dispatch"

    def advice(call: Call):
        seen.append((call.argument("x"), call.argument("y", 1)))
        call.args = (call.args[0] + 1,)
        seen.append((yield))

    wrapped = wrap(double, advice, told.append)
    assert wrapped(3) == 9
    assert seen == [(3, 1), 9]
    assert wrapped.mark == "dispatch"
    assert told == []


def test_advice_that_fails_before_or_after_is_told_and_the_function_runs_as_it_was_called():
    told = []

    def breaks_before(call: Call):
        call.args = ("changed",)
        raise ValueError("no such key")
        yield

    def breaks_after(call: Call):
        yield
        raise KeyError("gone")

    assert wrap(lambda x: x, breaks_before, told.append)("kept") == "kept"
    assert wrap(lambda x: x, breaks_after, told.append)("kept") == "kept"
    assert "no such key" in told[0]
    assert "gone" in told[1]


def test_an_error_of_the_function_is_its_own_and_advice_may_clean_up():
    cleaned = []

    def advice(call: Call):
        try:
            yield
        finally:
            cleaned.append(True)

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        wrap(fails, advice, cleaned.append)()
    assert cleaned == [True]


def test_coroutines_and_asynchronous_generators_stay_what_they_are():
    seen = []

    def advice(call: Call):
        seen.append((yield))

    async def answer(x):
        return x + 1

    async def stream(x):
        for number in range(x):
            yield number

    async def use():
        assert asyncio.iscoroutinefunction(wrap(answer, advice, seen.append))
        first = await wrap(answer, advice, seen.append)(1)
        items = [item async for item in wrap(stream, advice, seen.append)(3)]
        return first, items

    assert asyncio.run(use()) == (2, [0, 1, 2])
    assert seen == [2, 2]


def test_a_skipped_function_does_not_run():
    def advice(call: Call):
        call.skip(0.0)
        yield

    assert wrap(lambda: pytest.fail("it ran"), advice, pytest.fail)() == 0.0
