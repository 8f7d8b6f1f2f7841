"""``trainfer faults``: table, JSON, list, exit codes. The suite itself is stood in for: it takes minutes."""

import json

import pytest

from trainfer.cli.main import main
from trainfer.faults.records import Answer, Case, ControlOutcome, Outcome, Scores


def scores(*, right: bool) -> Scores:
    case = Case(fault="norm.eps/one", cause="norm.eps", seed=0, architecture="llama", dtype="float32", side="train", layer=1,
                magnitude=0.01)  # fmt: skip
    answer = Answer(verdict="diverged", stage="modules", module="a", tokens=frozenset(), causes=("norm.eps",), ranked=("a",),
                    shares=(None,), confirmed=(False,), first_step=None, abs_diff_mean=0.1, text="")  # fmt: skip
    outcome = Outcome(case=case, expected=("norm.eps",), expected_module="b", answer=answer, counted=True, ratio=9.0,
                      top1=right, top3=right, family=right, exact=right)  # fmt: skip
    control = ControlOutcome(
        name="N9 bf16", seed=0, alarm="" if right else "cause norm.eps", answer=None, seconds=1.0
    )
    return Scores(outcomes=(outcome,), controls=(control,), seeds=1, seconds=3.0)


@pytest.fixture
def asked(monkeypatch) -> list:
    calls: list = []

    def run_suite(seeds, *, only, generator, out, workers, progress):
        calls.append((seeds, only, generator, out, workers))
        progress(1, 2, "norm.eps/one, seed 0")
        return scores(right=only != "rope")

    monkeypatch.setattr("trainfer.faults.suite.run_suite", run_suite)
    return calls


def test_a_good_score_ends_with_zero(asked, capsys):
    assert main(["faults", "--seeds", "3", "--workers", "1"]) == 0
    assert asked == [(3, None, "first", None, 1)]
    shown = capsys.readouterr().out
    assert "norm.eps" in shown
    assert (
        "first module right 1 of 1, cause family right 1 of 1, 0 false alarms in 1 controls; 1 seeds, 3 s"
        in shown
    )


def test_a_missed_target_ends_with_one_and_says_which(asked, capsys):
    assert main(["faults", "--only", "rope"]) == 1
    shown = capsys.readouterr().out
    assert "target missed: module top-1 0.0% of 1 (target 95%)" in shown
    assert "target missed: 1 false alarms in 1 controls (target 0)" in shown
    assert "alarm   N9 bf16, seed 0: cause norm.eps" in shown


def test_json_is_one_document(asked, capsys):
    assert main(["faults", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["cases"][0]["fault"], data["cases"][0]["effect_over_noise"]) == (
        True,
        "norm.eps/one",
        9.0,
    )


def test_the_list_runs_nothing(asked, capsys):
    assert main(["faults", "--list"]) == 0
    assert not asked
    assert "| `kv_cache.seam/lost` |" in capsys.readouterr().out


def test_the_second_generator_has_its_own_list_and_run(asked, capsys):
    assert main(["faults", "--generator", "second", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "| `kv_cache.seam/block_table` |" in shown
    assert "| S6 cut vocabulary |" in shown
    assert "kv_cache.seam/lost" not in shown
    assert main(["faults", "--generator", "second", "--workers", "1"]) == 0
    assert asked == [(1, None, "second", None, 1)]


def test_an_unknown_choice_is_one_message_and_exit_two(capsys):
    assert main(["faults", "--only", "nothing", "--workers", "1"]) == 2
    assert "--only nothing: no fault of the suite" in capsys.readouterr().err
