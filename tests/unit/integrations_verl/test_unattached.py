"""Installed and not asked for: what the entry points of vLLM and verl load, and what they leave behind."""

import json
import os
import subprocess
import sys

import pytest

_LOADED = """
import importlib.metadata, json, os, sys, threading
group = sys.argv[1]
(entry,) = importlib.metadata.entry_points(group=group, name="trainfer")
modules, finders, environment = set(sys.modules), list(sys.meta_path), dict(os.environ)
found = entry.load()
if group == "vllm.general_plugins":
    found()
    found()
print(json.dumps({
    "new": sorted(set(sys.modules) - modules),
    "finders": sys.meta_path == finders,
    "environment": dict(os.environ) == environment,
    "threads": threading.active_count(),
}))
"""
_VARIABLES = ("TRAINFER_ATTACH", "TRAINFER_CAPTURE")


@pytest.mark.parametrize(
    ("group", "adapter"), [("vllm.general_plugins", "vllm"), ("verl.plugins", "verl")], ids=["vllm", "verl"]
)
@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_an_entry_point_that_nobody_asked_for_loads_itself_and_nothing_more(tmp_path, group, adapter, value):
    environment = {key: text for key, text in os.environ.items() if key not in _VARIABLES}
    if value is not None:
        environment |= dict.fromkeys(_VARIABLES, value)
    answer = subprocess.run(
        [sys.executable, "-c", _LOADED, group],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    found = json.loads(answer.stdout)
    foreign = {name for name in found["new"] if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign == {
        "trainfer",
        "trainfer.integrations",
        f"trainfer.integrations.{adapter}",
        f"trainfer.integrations.{adapter}.plugin",
    }
    assert found["finders"]
    assert found["environment"]
    assert found["threads"] == 1
    assert answer.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_asked_for_the_vllm_entry_point_watches_for_the_runner(tmp_path):
    code = _LOADED.replace("sys.meta_path == finders", "type(sys.meta_path[0]).__module__")
    answer = subprocess.run(
        [sys.executable, "-c", code, "vllm.general_plugins"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRAINFER_CAPTURE": json.dumps({"path": str(tmp_path / "dump")})},
        cwd=tmp_path,
    )
    assert json.loads(answer.stdout)["finders"] == "trainfer.integrations.vllm.install"
