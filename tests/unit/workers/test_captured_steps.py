"""Which steps are captured, what the environment adds, and a comparison that fails."""

import pytest

from trainfer.config.section_trainfer import ConsistencyConfig
from trainfer.errors import ConfigError
from trainfer.workers.comparison import LOG, Comparisons, Job
from trainfer.workers.consistency import CapturedSteps, read_switches


def chosen(environment=None, *, first_step=1, **keys):
    steps = CapturedSteps.of(
        ConsistencyConfig(**keys), read_switches(environment or {}), first_step=first_step
    )
    return [step for step in range(1, 13) if step in steps]


def test_nothing_is_captured_unless_asked_for():
    assert chosen() == []
    assert chosen({"PROMPTS_ONLY": "1"}) == []


def test_steps_count_from_one_and_zero_is_the_first():
    assert chosen(steps=(0, 7)) == [1, 7]
    assert chosen(steps=(1,), every=5) == [1, 5, 10]


@pytest.mark.parametrize("word", ["1", "true", " ON "])
def test_the_environment_adds_the_first_step_of_this_start(word):
    assert chosen({"DUMP_ON": word}) == [1]
    assert chosen({"DUMP_ON": word}, first_step=4) == [4]
    assert chosen({"DUMP_ON": word}, steps=(3,)) == [3]
    assert chosen({"DUMP_ON": word}, every=6) == [6, 12]


@pytest.mark.parametrize("word", ["", "0", "no"])
def test_off_leaves_the_configuration_alone(word):
    assert chosen({"DUMP_ON": word}) == []
    assert chosen({"DUMP_ON": word}, steps=(3,)) == [3]


def test_other_words_are_refused():
    with pytest.raises(ConfigError, match="PROMPTS_ONLY='2'"):
        read_switches({"PROMPTS_ONLY": "2"})


def test_a_comparison_that_fails_is_told_with_its_reason(tmp_path):
    comparisons = Comparisons(tmp_path)
    job = Job(step=3, rollout=tmp_path / "none", train=tmp_path / "none", out=tmp_path)
    comparisons.start(job)
    assert comparisons.unfinished == [job]
    (finished,) = comparisons.wait(60)
    comparisons.close()
    assert finished.verdict is None
    assert "none is no folder" in finished.problem
    assert "none is no folder" in (tmp_path / LOG).read_text()


def test_a_comparison_without_a_folder_to_write_to_is_told(tmp_path):
    comparisons = Comparisons(tmp_path)
    comparisons.start(Job(step=3, rollout=tmp_path, train=tmp_path, out=tmp_path / "gone"))
    (finished,) = comparisons.wait(60)
    assert finished.verdict is None
    assert finished.problem.startswith("no process: ")


def test_closing_ends_the_process(tmp_path):
    comparisons = Comparisons(tmp_path)
    comparisons.start(Job(step=1, rollout=tmp_path, train=tmp_path, out=tmp_path))
    comparisons.poll()
    comparisons.close()
    assert comparisons.unfinished == []
