import io
import logging
import math
import re
from dataclasses import dataclass, field, replace

import pytest
from rich.console import Console

from trainfer.cli.progress import (
    NextSteps,
    Progress,
    closing_summary,
    difference_text,
    duration_text,
    percent_text,
)
from trainfer.train.journal.metrics import MetricsLog


@dataclass
class Report:
    step: int
    total: int = 10
    metrics: dict[str, float] = field(default_factory=dict)


def metrics(score=0.5, **changed):
    return {
        "critic/score/mean": score,
        "mismatch/logp_abs_diff_max": 0.0,
        "mismatch/bitwise_equal_fraction": 1.0,
        "mismatch/tokens": 320.0,
        "perf/total_num_tokens": 1024.0,
        "timing_s/step": 2.0,
    } | changed


def test_elsewhere_each_step_is_one_plain_line():
    stream = io.StringIO()
    with Progress(total=10, first_step=1, console=Console(file=stream)) as progress:
        progress.stage("gen")
        progress.tokens(100)
        progress.step(Report(1, metrics=metrics()))
        progress.step(Report(2, metrics=metrics(0.75, **{"mismatch/logp_abs_diff_max": 3.21e-6})))
    assert stream.getvalue().splitlines() == [
        "step  1/10  reward 0.500  |Δlogp| max 0  bitwise 100 %  tok/s 512  s/step 2.00  left 18 s",
        "step  2/10  reward 0.750  |Δlogp| max 3.2e-06  bitwise 100 %  tok/s 512  s/step 2.00  left 16 s",
    ]


def test_time_left_after_a_resume_counts_only_what_is_left():
    stream = io.StringIO()
    with Progress(total=10, first_step=9, console=Console(file=stream)) as progress:
        progress.step(Report(9, metrics=metrics()))
    assert "left 2 s" in stream.getvalue()


def test_a_step_without_any_metric_is_still_a_line():
    stream = io.StringIO()
    now = iter([0.0, 1.5, 1.5, 1.5])
    with Progress(total=3, first_step=1, console=Console(file=stream), clock=lambda: next(now)) as progress:
        progress.step(Report(1, total=3))
    assert stream.getvalue() == "step 1/3  s/step 1.50  left 3 s\n"


def test_a_terminal_shows_stage_tokens_and_facts_and_keeps_warnings_and_the_last_step():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with Progress(total=10, first_step=1, console=console) as progress:
        progress.step(Report(4, metrics=metrics()))
        progress.stage("update_actor")
        progress.tokens(1234)
        logging.getLogger("trainfer.test").warning("a warning in between")
        progress._live.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "4/10" in text
    assert "step 5: updating for 0 s, 1,234 tokens sampled" in text
    assert text.rstrip().endswith("left 12 s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (187, "3 min 07 s"), (7500, "2 h 05 min"), (math.inf, "unknown")],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_only_exact_values_look_exact():
    assert difference_text(0.0) == "0"
    assert difference_text(1e-30) == "1.0e-30"
    assert difference_text(math.nan) == "nan"
    assert percent_text(1.0) == "100 %"
    assert percent_text(1 - 1e-12) == "99.99 %"
    assert percent_text(math.nan) == "unknown"


def finished(tmp_path, steps, *, total, checkpoint=True) -> NextSteps:
    folder = tmp_path / "my run"
    (folder / "checkpoints").mkdir(parents=True)
    if checkpoint:
        (folder / "checkpoints" / f"global_step_{steps}").mkdir()
    log = MetricsLog(folder / "metrics.jsonl", resumed_step=0)
    log.append(0, {"val-core/demo/reward/mean@1": 0.0})
    for step in range(1, steps + 1):
        log.append(
            step,
            metrics(
                step / steps,
                **{
                    "response_length/mean": 10.0,
                    "global_seqlen/mean": 32.0,
                    "weights/fingerprint_match": 1.0,
                },
            ),
        )
    log.close()
    return NextSteps(
        folder=folder,
        train_command="trainfer train a.yaml",
        total=total,
        tensorboard=True,
    )


def test_the_summary_says_what_was_reached_and_what_comes_next(tmp_path):
    text = closing_summary(finished(tmp_path, 8, total=8))
    assert text.splitlines()[:5] == [
        "Done: 8 steps in 16 s.",
        "  score        0.188 (first quarter) -> 0.938 (last quarter)",
        "  |Δlogp| max  0 over 2,560 sampled tokens, 100 % bitwise equal",
        "  weights      proven equal after 8 of 8 hand-overs",
        f"  checkpoint   {tmp_path}/my run/checkpoints/global_step_8",
    ]
    for command in (
        f"trainfer report '{tmp_path}/my run'",
        "trainfer eval a.yaml",
        f"trainfer export '{tmp_path}/my run' '{tmp_path}/my run'/exported",
        f"tensorboard --logdir '{tmp_path}/my run'/tensorboard",
        "trainfer train a.yaml trainer.total_training_steps=16",
    ):
        assert f"  {command}\n" in f"{text}\n"


def test_the_next_commands_start_the_same_program_on_the_same_run(tmp_path):
    run = finished(tmp_path, 8, total=8)
    text = closing_summary(
        replace(run, train_command=".venv/bin/trainfer train a.yaml trainer.default_local_dir='my run'")
    )
    assert "  .venv/bin/trainfer eval a.yaml 'trainer.default_local_dir=my run'\n" in text
    assert f"  .venv/bin/trainfer report '{tmp_path}/my run'\n" in text
    assert "  trainfer" not in text


def test_a_stopped_run_says_how_to_resume(tmp_path):
    text = closing_summary(finished(tmp_path, 4, total=8, checkpoint=False))
    assert text.startswith("Stopped after step 4 of 8: 4 steps")
    assert "none (trainer.save_freq)" in text
    assert text.endswith("  # resume from the newest checkpoint\n  trainfer train a.yaml")
    assert "trainfer export" not in text


def test_the_longer_run_names_its_number_of_steps_once(tmp_path):
    run = finished(tmp_path, 8, total=8)
    command = "trainfer train a.yaml trainer.total_training_steps=8 'data.train_files=[a b]'"
    text = closing_summary(replace(run, train_command=command))
    assert "  trainfer train a.yaml 'data.train_files=[a b]' trainer.total_training_steps=16" in text


def test_a_run_that_was_started_as_a_module_names_the_other_verbs_so(tmp_path):
    program = "/opt/python -u -m trainfer.cli.main"
    run = finished(tmp_path, 8, total=8)
    text = closing_summary(replace(run, train_command=f"{program} train a.yaml x=1"))
    for line in (f"{program} report ", f"{program} eval a.yaml x=1\n", f"{program} export "):
        assert f"  {line}" in text


def test_a_run_without_a_step_says_so(tmp_path):
    run = NextSteps(
        folder=tmp_path,
        train_command="trainfer train a.yaml",
        total=8,
        tensorboard=False,
    )
    assert closing_summary(run).startswith("No step was finished.")
