"""What must not be loaded is not loaded: proved in a fresh interpreter, and the proof can fail."""

import subprocess
import sys

import pytest

PLAIN = [
    "trainfer",
    "trainfer.errors",
    "trainfer.types",
    "trainfer.config.schema",
    "trainfer.config.load",
    "trainfer.plan.step",
    "trainfer.plan.packing",
    "trainfer.train.reward",
    "trainfer.train.advantage",
    "trainfer.cli.main",
]


def heavy_modules_after(statement: str) -> set[str]:
    code = (
        f"{statement}\nimport sys; print(*(sys.modules.keys() & {{'torch', 'transformers', 'ray', 'vllm'}}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("module", PLAIN)
def test_a_plain_module_loads_nothing_heavy(module: str):
    assert heavy_modules_after(f"import {module}") == set()


def test_the_proof_can_fail():
    assert heavy_modules_after("import trainfer.exact.logprobs") == {"torch"}
