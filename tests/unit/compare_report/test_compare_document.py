"""result.json is what the design says; tables and summary say the same."""

import csv
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest

from trainfer.check.compare.records import LogprobResult
from trainfer.check.diagnose import Diagnosis
from trainfer.check.report.document import logprob_part
from trainfer.check.report.tables import COLUMNS
from trainfer.check.report.text import token_ranges, visible
from trainfer.cli.main import main
from trainfer.errors import DumpError

STATUS = {"equal", "rounding", "diverged", "unmatched", "unreadable"}


class Stage(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    status: str
    summary: str


class Cause(msgspec.Struct, forbid_unknown_fields=True):
    """The design's fields, and what stands beside them."""

    cause: str
    stage: str
    module: str | None
    share_explained: float | None
    confirmed: bool
    evidence: list[str]
    fix: str
    repair: Literal["configuration", "execution", "objective"]
    modules: list[str]
    excluded: list[str]
    places: dict[str, str]


class Repair(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["configuration", "execution", "objective"]
    cause: str
    what: str
    places: dict[str, str]


class Module(msgspec.Struct):
    """The design's fields; more may stand beside them."""

    module: str
    rows: int
    max_abs: float
    mean_abs: float
    cosine: float
    ulp_max: int
    introduced: float
    inherited: float
    noise_floor: float
    status: str


class Logprobs(msgspec.Struct):
    count: int
    abs_diff_mean: float
    abs_diff_max: float
    k1: float
    k2: float
    k3: float
    pearson: float
    bitwise_equal_fraction: float


class Coverage(msgspec.Struct):
    rows_rollout: int
    rows_train: int
    rows_matched: int
    modules_matched: int
    modules_unmatched: list[str]
    how_matched: dict[str, int]


class Result(msgspec.Struct):
    schema: str
    verdict: str
    stages: list[Stage]
    first_divergence: dict[str, object] | None
    causes: list[Cause]
    repairs: list[Repair]
    next_steps: list[str]
    remaining: float | None
    coverage: Coverage
    modules: list[Module]
    logprobs: Logprobs


def test_the_document_has_the_shape_of_the_design(faulty: Diagnosis):
    found = msgspec.json.decode(faulty.json(), type=Result, strict=True)
    assert (found.schema, found.verdict) == ("trainfer.compare/1", "diverged")
    assert [stage.name for stage in found.stages] == [
        "tokens",
        "weights",
        "modules",
        "logprobs",
        "batch_shape",
    ]
    assert {stage.status for stage in found.stages} <= {"equal", "rounding", "diverged", "not_checked"}
    assert set(found.first_divergence) == {"stage", "module", "tokens", "pass"}
    assert found.first_divergence["module"] == "layers.1.mlp.2"
    assert all(len(token) == 2 for token in found.first_divergence["tokens"])
    assert {module.status for module in found.modules} <= STATUS
    assert found.coverage.rows_matched == found.coverage.rows_rollout == 36
    assert found.logprobs.count == 24


def test_a_clean_pair_has_no_first_divergence(clean: Diagnosis):
    found = json.loads(clean.json())
    assert found["verdict"] == "equal"
    assert found["first_divergence"] is None
    assert found["causes"] == []
    assert found["logprobs"]["bitwise_equal_fraction"] == 1.0


def test_log_prob_numbers_by_hand():
    """a = [−1, −2], b = [−1, −2.5]: d = [0, 0.5]."""
    result = LogprobResult(
        labels=np.zeros(2, dtype=np.int64),
        positions=np.arange(2),
        rollout=np.array([-1.0, -2.5]),
        train=np.array([-1.0, -2.0]),
        allowed=np.ones(2),
        declared=({}, {}),
    )
    part = logprob_part(result)
    assert (part.count, part.abs_diff_mean, part.abs_diff_max, part.k1) == (2, 0.25, 0.5, -0.25)
    assert part.k2 == pytest.approx(0.0625)
    assert part.k3 == pytest.approx((np.exp(0.5) - 1.5) / 2)
    assert part.pearson == pytest.approx(1.0)
    assert part.bitwise_equal_fraction == 0.5


def test_tables_have_a_line_per_tensor_and_run_no_formula(faulty: Diagnosis, tmp_path: Path):
    out = faulty.write(tmp_path / "report")
    with (out / "modules.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    results = {row["Rollout Name"]: row["Result"] for row in rows}
    assert results["layers.1.mlp.2.output.output"] == "error"
    assert results["layers.0.mlp.2.output.output"] == "pass"
    assert float(next(row for row in rows if row["Result"] == "error")["Cosine"]) > 0.99
    with zipfile.ZipFile(out / "modules.xlsx") as book:
        sheet = book.read("xl/worksheets/sheet1.xml").decode()
        assert "<f>" not in sheet
        assert "layers.1.mlp.2.output.output" in book.read("xl/sharedStrings.xml").decode()


def test_a_folder_that_cannot_be_written_is_one_message(faulty: Diagnosis, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="cannot be written"):
        faulty.write(tmp_path / "file")


def test_the_summary_begins_with_the_verdict(faulty: Diagnosis):
    lines = faulty.summary().splitlines()
    assert lines[0].startswith("DIVERGED: ")
    assert lines[1] == "layers.1.mlp.2 computes something else on the two sides; why is not known yet."
    assert lines[2].startswith(
        "first divergence: stage modules, layers.1.mlp.2, pass prefill, tokens 0:0-23, 1:0-11"
    )
    text = faulty.summary()
    assert "36 of 36 rollout rows matched" in text
    assert "worst modules" in text
    assert "worst tokens" in text


def test_control_characters_cannot_move_the_cursor():
    assert visible("a\x1b[2Jb\n") == "a\\x1b[2Jb\\n"


def test_token_ranges():
    assert token_ranges(((0, 17), (0, 18), (1, 4))) == "0:17-18, 1:4"
    assert token_ranges(tuple((i, 0) for i in range(6))).endswith("and 2 more runs")


@pytest.mark.parametrize(("name", "code"), [("faulty", 1), ("clean", 0)])
def test_the_command_prints_writes_and_tells_by_its_exit_code(
    name: str, code: int, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    request.getfixturevalue(name)
    base = request.getfixturevalue("tmp_path_factory").getbasetemp()
    folders = [str(base / f"{name}0" / side) for side in ("rollout", "train")]
    assert main(["compare", *folders, "--json", "--out", str(tmp_path / "out")]) == code
    printed = capsys.readouterr()
    assert json.loads(printed.out)["schema"] == "trainfer.compare/1"
    assert (tmp_path / "out" / "report.html").is_file()
    assert main(["compare", str(tmp_path), folders[0]]) == 2
    assert "holds no dump" in capsys.readouterr().err


def test_report_and_explanation_load_no_torch():
    code = (
        "import sys; import trainfer.check.report.comparison, trainfer.check.report.text, trainfer.check.report.tables,"
        "trainfer.check.explain.verdict; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
