import json
import math
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from report_run_folders import add_rollouts, metrics, run_folder

from trainfer.check.report.training import (
    MAX_PAGE_BYTES,
    agreement,
    render_training_report,
    stages,
    write_training_report,
)
from trainfer.check.report.training_curves import buckets, linear_curve, log_curve, nice_ticks, number_text
from trainfer.check.report.training_reading import read_run
from trainfer.cli.report import command
from trainfer.errors import RunFolderError
from trainfer.train.journal.digest import digest
from trainfer.train.journal.metrics import read_metrics


def test_exact_agreement_is_claimed_only_when_every_token_of_every_step_is_equal(tmp_path):
    exact = agreement(read_run(run_folder(tmp_path, [(step, metrics(step)) for step in range(1, 101)])))
    assert exact.tone == "exact"
    assert exact.detail.startswith("Largest |Δlogp| 0 over 51,200 sampled tokens in 100 steps")


@pytest.mark.parametrize(
    ("changed", "tone", "words"),
    [
        ({"mismatch/logp_abs_diff_max": 3.2e-6}, "measured", "3.2e-6"),
        ({"mismatch/bitwise_equal_fraction": 1 - 1e-9}, "measured", "99.99 %"),
        ({"mismatch/logp_abs_diff_max": math.nan}, "broken", "step 7"),
        ({"mismatch/nonfinite_tokens": 2.0}, "broken", "2 tokens"),
    ],
)
def test_one_step_is_enough_to_lose_the_claim(tmp_path, changed, tone, words):
    lines = [(step, metrics(step, **(changed if step == 7 else {}))) for step in range(1, 101)]
    found = agreement(read_run(run_folder(tmp_path, lines)))
    assert found.tone == tone
    assert words in found.headline + found.detail


def test_what_was_not_measured_is_not_claimed(tmp_path):
    folder = run_folder(tmp_path, [(1, {"critic/score/mean": 0.5})])
    assert agreement(read_run(folder)).tone == "unknown"


def test_only_compared_tokens_are_claimed_and_shares_are_of_tokens(tmp_path):
    few = {"mismatch/tokens": 100.0, "mismatch/bitwise_equal_fraction": 0.5}
    found = agreement(
        read_run(
            run_folder(tmp_path, [(1, metrics(1, **few)), (2, metrics(2, **{"mismatch/tokens": 300.0}))])
        )
    )
    assert "over 400 sampled tokens" in found.detail
    assert "87.50 % of the tokens are bitwise equal" in found.detail


def test_the_validation_before_training_is_a_dot_at_step_0(tmp_path):
    first = metrics(1, **{"val-core/a/reward/mean@4": 0.5, "val-before-train/a/reward/mean@4": 0.25})
    run = read_run(run_folder(tmp_path, [(1, first), (2, metrics(2, **{"val-core/a/reward/mean@4": 0.75}))]))
    series = run.series["val-core/a/reward/mean@4"]
    assert list(zip(series.steps, series.values, strict=True)) == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert "validation, step 0: 0.25" in render_training_report(run)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ("actor_rollout_ref: {model: {path: models/small}}", "models/small"),
        (
            "actor_rollout_ref: {model: {path: null}}\ntrainfer: {warmup: {architecture: qwen3}}",
            "tiny qwen3 made on the spot",
        ),
        ("trainfer: {warmup: null}", "unknown model"),
    ],
)
def test_the_header_names_what_trains(tmp_path, config, model):
    folder = run_folder(tmp_path, [(1, metrics(1))])
    (folder / "config.yaml").write_text(config)
    assert read_run(folder).model == model


def test_a_kl_curve_is_drawn_only_where_a_kl_term_was_measured(tmp_path):
    without = render_training_report(read_run(run_folder(tmp_path, [(1, metrics(1))])))
    assert "KL to the reference" not in without
    for name, place in (("actor/kl_loss", "in the loss"), ("actor/reward_kl_penalty", "in the reward")):
        page = render_training_report(read_run(run_folder(tmp_path, [(1, metrics(1, **{name: 0.1}))])))
        assert page.count("<h3>KL to the reference</h3>") == 1
        assert place in page


def test_times_are_shares_of_the_step_and_the_rest_is_other(tmp_path):
    found = stages(read_run(run_folder(tmp_path, [(step, metrics(step)) for step in (1, 2)])))
    assert [(stage.name, stage.seconds, stage.share) for stage in found] == [
        ("sampling", 0.5, 0.5), ("update", 0.25, 0.25), ("other", 0.25, 0.25),
    ]  # fmt: skip


def test_text_from_the_run_is_escaped_everywhere(tmp_path):
    folder = run_folder(tmp_path, [(step, metrics(step)) for step in (1, 2)])
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    for step in (1, 2):
        add_rollouts(folder, step, [hostile, "plain"])
    page = write_training_report(folder).read_text()
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "<b>e</b>" not in page
    assert "&lt;img src=x onerror=alert(2)&gt;" in page
    assert page.count("<script") == page.count("</script>")


def test_the_page_names_no_address_to_load(tmp_path):
    page = write_training_report(run_folder(tmp_path, [(1, metrics(1))])).read_text()
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'>) ]+)""", page) == ["data:,"]
    assert "http" not in page.replace("http-equiv", "")


def test_a_huge_run_stays_small_and_keeps_its_extremes(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 60_001):
            spike = 0.5 if step == 31_234 else 1e-6
            file.write(
                json.dumps({"step": step, "critic/score/mean": step % 2, "mismatch/logp_abs_diff_max": spike})
            )
            file.write("\n")
    run = read_run(folder)
    page = render_training_report(run)
    assert len(page.encode()) < MAX_PAGE_BYTES / 2
    series = run.series["mismatch/logp_abs_diff_max"]
    assert max(float(point.value) for point in log_curve(series.steps, series.values).points) == 0.5


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    folder = run_folder(tmp_path, [(step, metrics(step)) for step in (1, 2, 3)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"step": 2}\n[1]\n\xff\xfe\n{"step": "9"}\n' + b"[" * 50_000 + b"\n" + b'{"step": 4, "critic'
        )
    (folder / "rollouts" / "1.jsonl").write_bytes(b"\x00\xff" * 1000)
    (folder / "config.yaml").write_bytes(b"a: &a [*a, \xff")
    (folder / "plan.json").unlink()
    run = read_run(folder)
    assert run.last_step == 3
    assert [note for note in run.notes if note.startswith("6 line(s) of metrics.jsonl are damaged")]
    page = render_training_report(run)
    assert "rollouts/1.jsonl holds no readable sequence" in page
    assert "plan.json cannot be read" in page


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(
                ["critic/score/mean", "mismatch/logp_abs_diff_max", "timing_s/step", "actor/entropy"]
            ),
            st.floats() | st.none() | st.text(max_size=3) | st.integers(),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_no_number_in_the_file_breaks_the_page(tmp_path_factory, entries):
    folder = tmp_path_factory.mktemp("run")
    with (folder / "metrics.jsonl").open("w") as file:
        for step, entry in enumerate(entries, start=1):
            clean = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()
            }
            file.write(json.dumps({"step": step, **clean}) + "\n")
    page = render_training_report(read_run(folder))
    assert not re.search(r'(?:d|x|y|cx|cy|x1|y1)="[^"]*(?:nan|inf)', page)


def test_the_smallest_floats_have_a_place_on_the_axis():
    curve = linear_curve([1, 2], [0.0, 5e-324], from_zero=True)
    assert curve is not None
    assert all(math.isfinite(point.y) for point in curve.points)


@settings(deadline=None)
@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_ticks_enclose_the_values_and_are_few(a, b):
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 21
    assert ticks == sorted(ticks)
    slack = 1e-6 * max(abs(low), abs(high), 1e-290)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack


def test_ticks_and_numbers_by_hand():
    assert nice_ticks(0, 0.93) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert [number_text(value) for value in (0, 0.5, 3.2e-6, 12345678.0, -0.00123, 1e12)] == [
        "0", "0.5", "3.2e-6", "12,345,678", "-0.00123", "1e12",
    ]  # fmt: skip


def test_buckets_keep_order_mean_and_extremes():
    (first, second) = buckets([1, 2, 3, 4], [1.0, 3.0, math.nan, 8.0], limit=2)
    assert (first.first, first.last, first.mean, first.least, first.largest) == (1, 2, 2.0, 1.0, 3.0)
    assert (second.first, second.last, second.mean) == (4, 4, 8.0)


def test_a_curve_of_one_step_and_one_without_a_number():
    assert linear_curve([5], [0.25]).points[0].value == "0.25"
    assert linear_curve([1, 2], [math.nan, math.inf]) is None


def test_exact_zero_has_its_own_line_below_every_other_value():
    curve = log_curve([1, 2, 3], [0.0, 1e-9, 1e-3])
    zero, small, large = (point.y for point in curve.points)
    assert zero > small + 20 > large
    assert curve.y_ticks[0].label == "0"


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_folder_without_steps_is_an_error_in_words(tmp_path, what):
    if what == "empty":
        (tmp_path / "metrics.jsonl").write_text('{"step"')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl"):
        write_training_report(tmp_path)


def test_an_unwritable_page_is_named(tmp_path):
    folder = run_folder(tmp_path, [(1, metrics(1))])
    with pytest.raises(RunFolderError, match="--out"):
        write_training_report(folder, tmp_path / "none" / "page.html")


def test_the_command_writes_where_it_is_told(tmp_path):
    folder = run_folder(tmp_path, [(1, metrics(1))])
    result = CliRunner().invoke(command, [str(folder), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert not (folder / "report.html").exists()


def test_the_report_loads_no_torch():
    code = (
        "import sys, trainfer.cli.report; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_report_and_the_closing_summary_count_the_same(tmp_path):
    folder = run_folder(
        tmp_path, [(0, {"val-core/a/reward/mean@1": 0.1}), *((k, metrics(k)) for k in range(1, 9))]
    )
    reached = digest(read_metrics(folder / "metrics.jsonl"))
    assert reached.compared_tokens == 8 * 512
    assert (reached.num_steps, reached.proven_syncs, reached.checked_syncs) == (8, 8, 8)
    assert (reached.first_score, reached.last_score) == pytest.approx((0.015, 0.075))
    assert f"{reached.compared_tokens:,} sampled tokens" in agreement(read_run(folder)).detail
