"""The suite itself: one seed of everything, and how a case is run, kept and scored."""

import pytest

from trainfer.faults.catalogue import FAULTS
from trainfer.faults.generators import Generator
from trainfer.faults.show import failure_line
from trainfer.faults.suite import failures, one_thread, run_case, run_suite
from trainfer.faults.tally import tally


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("generator", [Generator.FIRST, Generator.SECOND])
def test_one_seed_of_everything_reaches_the_targets(generator):
    pytest.importorskip("peft")
    one_thread()
    scores = run_suite(1, generator=generator)
    said = "\n".join(failure_line(outcome) for outcome in failures(scores))
    assert tally(scores).missed == (), said


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
