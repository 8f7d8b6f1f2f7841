"""A violation of exact mode names the first module that differs, by a capture of one sequence on both sides."""

import logging

import pytest
import torch
from consistency_runs import configured, group_with, make_world

from trainfer.check.report.captured import read_verdict
from trainfer.errors import EngineError
from trainfer.run import run_steps
from trainfer.workers.session import open_session


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def said(caplog):
    caplog.set_level(logging.INFO, logger="trainfer")
    return caplog


def fault_in(name, apply):
    """A builder of groups in whose engine a module's output is changed."""

    def change(engine):
        engine.module.get_submodule(name).register_forward_hook(lambda module, args, output: apply(output))

    return group_with(change)


def next_float(rows):
    """The last bit of one element of each row."""
    changed = rows.clone()
    changed[..., 0] = torch.nextafter(rows[..., 0], torch.full_like(rows[..., 0], torch.inf))
    return changed


def scaled(rows):
    return rows * 1.0001


def only_among_others(rows):
    """As a kernel that sums in another order where there are more rows."""
    return scaled(rows) if rows.shape[1] > 28 else rows


@pytest.mark.parametrize(
    ("module", "apply", "verdict"),
    [
        ("model.layers.1.mlp.down_proj", lambda rows: rows * 1.5, "diverged"),
        ("model.layers.0.self_attn.o_proj", next_float, "rounding"),
    ],
)
def test_with_exact_insisted_on_the_run_ends_with_the_module_s_name(world, tmp_path, module, apply, verdict):
    run = tmp_path / "run"
    loaded = configured(world, run, "trainfer.exact=true")
    with (
        open_session(loaded, make_group=fault_in(module, apply)) as session,
        pytest.raises(EngineError) as raised,
    ):
        list(run_steps(session))
    folder = run / "consistency" / "step_1" / "violation"
    assert str(raised.value).splitlines()[1] == (
        f"A capture of one sequence on both sides: {verdict}; the first module that differs is {module}. "
        f"Report: {folder / 'report.html'}."
    )
    found = read_verdict(folder, 1)
    assert found is not None
    assert found.rows_matched == found.rows_rollout > 0
    (line,) = (folder / "train" / "rank0" / "tokens.jsonl").read_text().splitlines()
    assert '"pass_name":"old_log_prob"' in line


def test_left_to_itself_exact_mode_tells_it_once_and_goes_on(world, tmp_path, said):
    loaded = configured(world, tmp_path / "run", "trainer.total_training_steps=3")
    group = fault_in("model.layers.1.mlp.down_proj", scaled)
    with open_session(loaded, make_group=group) as session:
        reports = list(run_steps(session))
    assert len(reports) == 3
    assert all(report.metrics["mismatch/bitwise_equal_fraction"] < 1 for report in reports)
    (warning,) = [text for text in said.messages if "exact mode" in text]
    assert warning.startswith("step 1: ")
    assert "the first module that differs is model.layers.1.mlp.down_proj. Report: " in warning


def test_what_differs_only_in_company_is_found_in_company(world, tmp_path, said):
    loaded = configured(world, tmp_path / "run", "trainer.total_training_steps=1")
    group = fault_in("model.layers.0.mlp.down_proj", only_among_others)
    with open_session(loaded, make_group=group) as session:
        list(run_steps(session))
    (warning,) = [text for text in said.messages if "exact mode" in text]
    assert "One sequence alone is equal on both sides; with the others of the step: " in warning
    assert "the first module that differs is model.layers.0.mlp.down_proj. Report: " in warning


def test_where_exactness_is_not_expected_nothing_is_captured(world, tmp_path, said):
    loaded = configured(world, tmp_path / "run", "trainfer.exact=false", "trainer.total_training_steps=1")
    with open_session(loaded, make_group=fault_in("model.norm", scaled)) as session:
        list(run_steps(session))
    assert not (tmp_path / "run" / "consistency").exists()
