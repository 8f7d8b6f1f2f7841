"""Stock verl and vLLM with trainfer installed beside them: without ``trainfer attach`` nothing is hooked, written or loaded.

Takes the environment of ``make setup-verl``; about a minute. Each check is run the other way too, so that it can fail.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from verl091_runs import ENVIRONMENT, python

from trainfer.integrations.verl.settings import VARIABLE, AttachSettings
from trainfer.integrations.verl.v091 import TABLE

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1200)]
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model"
POINTS = [f"{point.module}:{point.name}" for point in TABLE.points]
CAPTURE = "TRAINFER_CAPTURE"


def _found(tmp_path, asked):
    if not python().exists():
        pytest.skip(f"{python()} is not there: make setup-verl")
    work = tmp_path / "work"
    work.mkdir()
    plain = {key: value for key, value in os.environ.items() if key not in (VARIABLE, CAPTURE)}
    answer = subprocess.run(
        [python(), Path(__file__).with_name("unattached.py"), RUNNER, *POINTS],
        env={**plain, **ENVIRONMENT, "TMPDIR": str(work), **asked},
        cwd=work,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith("FOUND ")]
    written = [path.name for path in work.rglob("*") if "trainfer" in path.name]
    return json.loads(line.removeprefix("FOUND ")), written


def test_nobody_asked_and_nothing_of_verl_or_vllm_is_touched(tmp_path):
    found, written = _found(tmp_path, {})
    assert found["marked"] == []
    assert found["finders"] == []
    assert found["modules"] == [
        "trainfer",
        "trainfer.integrations",
        "trainfer.integrations.verl",
        "trainfer.integrations.verl.plugin",
        "trainfer.integrations.vllm",
        "trainfer.integrations.vllm.plugin",
    ]
    assert written == []


def test_asked_for_every_point_is_hooked(tmp_path):
    settings = AttachSettings(out=str(tmp_path / "out"), verl=TABLE.version, run_id="r")
    capture = json.dumps({"path": str(tmp_path / "dump")})
    found, _ = _found(tmp_path, {VARIABLE: settings.encode(), CAPTURE: capture})
    assert found["marked"] == [RUNNER, *POINTS]
