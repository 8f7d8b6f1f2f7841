"""The suite itself, one seed of a cheap part: the score may rise and must not drop."""

import pytest

from trainfer.faults.catalogue import FAULTS
from trainfer.faults.controls import CONTROLS
from trainfer.faults.records import Scores
from trainfer.faults.show import failure_line
from trainfer.faults.suite import failures, one_thread, run_case, run_control
from trainfer.faults.tally import tally

PART = (
    "tokens.inserted/start", "tokens.truncated/end", "weights.stale/one_parameter", "weights.adapter_scale/merged",
    "rope.scaling/attention_factor", "rope.dtype/table", "attention.cross_sequence/packed", "norm.eps/one",
    "head.dtype/compute", "kv_cache.stale_prefix/hits", "logprob.temperature/raw", "logprob.filtered/top_p",
)  # fmt: skip
CONTROLLED = ("N1 residual in two parts", "N6 last token", "N9 bf16", "N12 policy moved")


@pytest.mark.slow
def test_the_score_does_not_drop(tmp_path):
    one_thread()
    outcomes = [run_case(FAULTS[name], 0, tmp_path / "case") for name in PART]
    controls = [
        run_control(control, 0, tmp_path / "control") for control in CONTROLS if control.name in CONTROLLED
    ]
    scores = Scores(outcomes=tuple(outcomes), controls=tuple(controls), seeds=1, seconds=0.0)
    result = tally(scores)
    said = "\n".join(failure_line(outcome) for outcome in failures(scores))
    assert [control.alarm for control in controls] == [""] * len(CONTROLLED)
    assert result.total.top1.right == result.total.top1.of == 8, said
    assert result.total.family.right >= 6, said


def test_a_case_is_the_same_each_time(tmp_path):
    first, second = (run_case(FAULTS["tokens.inserted/one"], 1, tmp_path / str(n)) for n in range(2))
    assert first.answer == second.answer
    assert (first.top1, first.family, first.tokens) == (None, True, 1.0)
    assert not (tmp_path / "0").exists(), "dumps are deleted"


def test_a_failure_is_kept_with_its_dumps_and_report(tmp_path, monkeypatch):
    monkeypatch.setattr("trainfer.faults.suite.is_failure", lambda outcome: True)
    run_case(FAULTS["tokens.truncated/end"], 0, tmp_path / "case", keep=tmp_path / "out")
    kept = tmp_path / "out" / "tokens.truncated-end-seed0"
    assert {path.name for path in kept.iterdir()} == {"rollout", "train", "report"}
    assert (kept / "report" / "result.json").is_file()


def test_what_raises_is_a_failed_case_with_its_words(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("no such thing")

    monkeypatch.setattr("trainfer.faults.suite.compare", broken)
    outcome = run_case(FAULTS["norm.eps/one"], 0, tmp_path / "case")
    assert (outcome.top1, outcome.family, outcome.error) == (False, False, "ValueError: no such thing")
    assert "no such thing" in failure_line(outcome)
    assert not (tmp_path / "case").exists()
