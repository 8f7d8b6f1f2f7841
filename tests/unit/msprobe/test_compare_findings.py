"""The page "Compared with msProbe" holds the tables of a whole run, and msProbe still says what they say it does."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[3]
PAGE = CLONE / "docs/compared-with-msprobe.md"
PYTHON = CLONE / ".venv-msprobe/bin/python"
sys.path.insert(0, str(CLONE / "benchmarks/peers"))

from planted import CASES, make_inputs, make_model  # noqa: E402


def table_rows():
    text = PAGE.read_text(encoding="utf-8")
    lines = text.partition("<!-- findings: begin -->")[2].partition("<!-- findings: end -->")[0].splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")
    ]
    return {row[0].partition(" (`")[0]: row[1:] for row in cells}


def test_the_page_has_every_case_and_its_sums_are_right():
    rows = table_rows()
    assert len([case for case in CASES if not case.clean]) == 12
    faults = [rows[case.what] for case in CASES if not case.clean]
    for words, kind in (
        ("module and cause right", "right:"),
        ("module and the cause's family right", "family right:"),
        ("module right, no cause or a wrong one", "module right:"),
        ("seen, another module named first", "seen, elsewhere:"),
        ("missed", "**missed**:"),
    ):
        counted = [sum(row[column].startswith(kind) for row in faults) for column in range(4)]
        assert [int(cell) for cell in rows[words]] == counted, words
    clean = [rows[case.what] for case in CASES if case.clean]
    alarms = [sum(row[column].startswith("**false alarm**") for row in clean) for column in range(4)]
    assert [int(cell) for cell in rows["false alarms"]] == alarms


@pytest.mark.parametrize("case", [case for case in CASES if not case.clean], ids=lambda case: case.name)
def test_each_fault_is_there_and_where_it_is_said_to_be(case):
    """The planted module, given the same inputs, gives another output; clean modules before it do not."""
    import torch

    found = {}
    for side in ("rollout", "train"):
        model = make_model(case, side)
        model.set_attn_implementation("eager")
        if case.steps > 1 and side == "train":
            with torch.no_grad():
                model.get_submodule(case.module).weight.add_(1e-3)
        outputs = found[side] = {}

        def keep(name, outputs=outputs):
            def hook(_module, _args, output):
                first = output[0] if isinstance(output, tuple) else output
                outputs[name] = first

            return hook

        for name, module in model.named_modules():
            if name.count(".") > 0 or name == "lm_head":
                module.register_forward_hook(keep(name))
        rows, arguments = make_inputs(case, side)
        with torch.no_grad():
            model(**arguments)
        found[side, "rows"] = rows
    if case.module is None:
        different_tokens = found["rollout", "rows"] != found["train", "rows"]
        assert different_tokens == (case.name == "token")
        assert case.name == "token" or case.temperature != 1.0
        return
    names = list(found["rollout"])
    unlike = [n for n in names if not torch.equal(found["rollout"][n], found["train"][n])]
    inside = [n for n in unlike if n.startswith(case.module)]
    assert case.module in unlike
    assert unlike[0] in inside


@pytest.mark.slow
@pytest.mark.msprobe
@pytest.mark.skipif(not PYTHON.is_file(), reason=f"{PYTHON} is not there: make setup-msprobe")
def test_a_run_says_what_the_page_says_of_msprobe(tmp_path):
    chosen = ["weight", "rope-scaling", "clean-bf16"]
    command = [
        sys.executable, str(CLONE / "benchmarks/compare_findings.py"), "--msprobe-python", str(PYTHON), "--only", *chosen,
        "--json", str(tmp_path / "said.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "said.json").read_text())
    rows = table_rows()
    for case in CASES:
        if case.name in chosen:
            verdicts = [re.match(r"[^:]+", cell)[0] for cell in rows[case.what][:2]]
            assert [said[case.name][key]["judged"] for key in ("msprobe", "columns")] == verdicts
