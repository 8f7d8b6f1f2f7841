"""Captured steps in the loop: both sides are captured, compared in the background, and nothing else changes."""

import logging
from pathlib import Path

import pytest
import torch
from consistency_runs import configured, group_with, lines, make_world, result
from safetensors.torch import load_file

from trainfer.check.dump.folder import read_manifests
from trainfer.check.report.captured import read_verdicts
from trainfer.check.report.training import render_training_report
from trainfer.check.report.training_reading import read_run
from trainfer.cli.export import export_checkpoint
from trainfer.cli.progress import NextSteps, closing_summary
from trainfer.errors import ConfigError
from trainfer.run import run_steps, train
from trainfer.workers.session import open_session

THREE_STEPS = ("trainer.total_training_steps=3", "trainer.save_freq=3")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def said(caplog):
    caplog.set_level(logging.INFO, logger="trainfer")
    return caplog


@pytest.fixture(scope="module")
def captured(world, tmp_path_factory):
    """Steps 1 (asked for as 0) and 3 of three, everything else as in ``plain``."""
    run = tmp_path_factory.mktemp("runs") / "captured"
    reports = list(train(configured(world, run, "trainfer.consistency.steps=[0,3]", *THREE_STEPS)))
    return run, reports


@pytest.mark.parametrize(("step", "version"), [(1, 0), (3, 2)])
def test_the_builtin_engine_and_the_update_are_equal_in_every_row(captured, step, version):
    run, reports = captured
    found = result(run, step)
    assert found["verdict"] == "equal"
    assert {stage["name"]: stage["status"] for stage in found["stages"]} == dict.fromkeys(
        ("tokens", "weights", "modules", "logprobs", "batch_shape"), "equal"
    )
    coverage = found["coverage"]
    assert coverage["rows_matched"] == coverage["rows_rollout"] > 0
    assert coverage["modules_unmatched"] == []
    tokens = sum(len(record.sequence.response_ids) for record in reports[step - 1].records)
    assert found["logprobs"]["count"] == tokens
    folder = run / "consistency" / f"step_{step}"
    for side, passes in (("rollout", {"prefill", "decode"}), ("train", {"update"})):
        (manifest,) = read_manifests(folder / side).values()
        assert manifest.side == side
        assert manifest.complete
        assert manifest.config["trainer"]["total_training_steps"] == 3
        names = {path.name.rpartition("-")[0] for path in (folder / side / "rank0").glob("step*/*")}
        assert names == passes
        assert f'"weights_version":{version}' in (folder / side / "rank0" / "weights.jsonl").read_text()


def test_only_the_chosen_steps_are_captured(captured):
    run, _ = captured
    assert sorted(path.name for path in (run / "consistency").iterdir()) == ["step_1", "step_3"]


def test_capturing_changes_neither_a_metric_nor_a_weight(captured, world, tmp_path):
    run, _ = captured
    list(train(configured(world, tmp_path / "plain", *THREE_STEPS)))
    assert lines(run) == lines(tmp_path / "plain")
    weights = []
    for folder, name in ((run, "a"), (tmp_path / "plain", "b")):
        checkpoint = folder / "checkpoints" / "global_step_3"
        export_checkpoint(checkpoint, tmp_path / name, dtype=None, overwrite=False)
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_closing_summary_and_the_run_s_report_name_the_verdicts(captured):
    run, _ = captured
    text = closing_summary(
        NextSteps(folder=run, train_command="trainfer train x.yaml", total=3, tensorboard=False)
    )
    page = run / "consistency" / "step_3" / "report.html"
    assert f"  consistency  step 1 equal, step 3 equal: {page}\n" in text
    assert page.is_file()
    html = render_training_report(read_run(run))
    assert "Captured steps" in html
    assert 'href="consistency/step_3/report.html"' in html


def test_the_hf_engine_agrees_within_rounding(world, tmp_path, said):
    run = tmp_path / "run"
    list(
        train(
            configured(
                world,
                run,
                "actor_rollout_ref.rollout.name=hf",
                "trainfer.consistency.every=2",
                "trainfer.exact=auto",
            )
        )
    )
    (verdict,) = read_verdicts(run)
    assert (verdict.step, verdict.verdict) == (2, "rounding")
    assert verdict.rows_matched == verdict.rows_rollout > 0
    assert f"consistency step 2: {verdict.line()}" in said.messages


def test_two_optimizer_steps_with_filters_are_compared_over_the_first(world, tmp_path):
    run = tmp_path / "run"
    list(
        train(
            configured(
                world,
                run,
                "trainfer.consistency.steps=[1]",
                "trainer.total_training_steps=1",
                "trainfer.consistency.task=sketch",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "actor_rollout_ref.rollout.top_p=0.9",
                "actor_rollout_ref.rollout.temperature=0.8",
            )
        )
    )
    found = result(run, 1)
    assert found["verdict"] in ("equal", "rounding")
    assert found["causes"] == []
    assert found["logprobs"]["bitwise_equal_fraction"] == 1.0
    assert 0 < found["coverage"]["rows_matched"] < found["coverage"]["rows_rollout"]


class TestAWeightThatTheEngineLost:
    @pytest.fixture
    def stale(self):
        """After every hand-over, and behind its proof, one weight of the engine changes."""

        def change(engine):
            load, told = engine.load_weights, engine.weight_fingerprints
            proven = {}

            def load_weights(named_tensors, *, version):
                load(named_tensors, version=version)
                proven.update(told())
                with torch.no_grad():
                    engine.module.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] += 0.25

            engine.load_weights = load_weights
            engine.weight_fingerprints = lambda: dict(proven)

        return group_with(change)

    def test_is_named_and_training_goes_on(self, world, tmp_path, said, stale):
        run = tmp_path / "run"
        loaded = configured(world, run, "trainfer.consistency.steps=[1]", "trainfer.exact=false")
        with open_session(loaded, make_group=stale) as session:
            reports = list(run_steps(session))
        assert len(reports) == 2
        found = result(run, 1)
        assert found["verdict"] == "diverged"
        assert found["first_divergence"]["stage"] == "weights"
        assert found["first_divergence"]["module"] == "model.layers.1.mlp.down_proj"
        (line,) = [record for record in said.records if "consistency step 1" in record.getMessage()]
        assert line.levelname == "WARNING"
        assert "diverge at stage weights in model.layers.1.mlp.down_proj" in line.getMessage()
        assert str(run / "consistency" / "step_1" / "report.html") in line.getMessage()


def test_prompts_only_sees_prompts_skips_the_optimizer_and_says_so(world, tmp_path, said):
    run = tmp_path / "run"
    reports = list(
        train(
            configured(
                world,
                run,
                "trainfer.consistency.steps=[1]",
                "trainfer.consistency.prompts_only=true",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            )
        )
    )
    folder = run / "consistency" / "step_1"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"generate_sequences", "update_actor"}
    assert [report.metrics["actor/skipped_steps"] for report in reports] == [2.0, 0.0]
    assert [report.proof.weights_version for report in reports] == [0, 2]
    assert (
        "consistency step 1: prompts only. The update saw prompts alone; its 2 optimizer step(s) were skipped."
        in said.messages
    )
    found = result(run, 1)
    assert found["verdict"] == "equal"
    longest = max(len(record.sequence.prompt.token_ids) for record in reports[0].records)
    prompts = {record.sequence.prompt.token_ids for record in reports[0].records}
    coverage = found["coverage"]
    # prompts that begin alike share rows
    assert longest < coverage["rows_matched"] == coverage["rows_rollout"] <= sum(map(len, prompts))
    assert not list((folder / "generate_sequences").rglob("decode-*"))


@pytest.mark.parametrize(
    ("prompts_only", "sides"), [("", ("rollout", "train")), ("1", ("generate_sequences", "update_actor"))]
)
def test_the_environment_switches_the_first_step_on(world, tmp_path, monkeypatch, prompts_only, sides):
    monkeypatch.setenv("DUMP_ON", "1")
    monkeypatch.setenv("PROMPTS_ONLY", prompts_only)
    list(train(configured(world, tmp_path / "run", "trainer.total_training_steps=1")))
    (folder,) = (tmp_path / "run" / "consistency").iterdir()
    assert folder.name == "step_1"
    assert all((folder / side / "manifest.json").is_file() for side in sides)
    (verdict,) = read_verdicts(tmp_path / "run")
    assert verdict.verdict == "equal"


def test_an_environment_that_says_neither_yes_nor_no_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.setenv("DUMP_ON", "maybe")
    with pytest.raises(ConfigError, match=r"DUMP_ON='maybe'.*1 or 0"):
        list(train(configured(world, tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_an_engine_without_a_module_is_not_captured_and_says_so(world, tmp_path, said):
    script = tmp_path / "script.jsonl"
    script.write_text('{"response": "ba"}\n' * 16)
    loaded = configured(
        world,
        tmp_path / "run",
        "actor_rollout_ref.rollout.name=scripted",
        f"trainfer.scripted_responses={script}",
        "trainfer.consistency.every=1",
    )
    assert len(list(train(loaded))) == 2
    assert read_verdicts(tmp_path / "run") == ()
    assert [text for text in said.messages if "No step is captured" in text] == [
        "No step is captured: the engine computes with no module of this process (rollout.name=builtin, hf and vllm can "
        "be watched)."
    ]


def test_a_step_that_runs_again_replaces_its_own_dump(world, tmp_path):
    run = tmp_path / "run"
    settings = ("trainfer.consistency.steps=[2]", "trainer.save_freq=1")
    loaded = configured(world, run, *settings)
    with open_session(loaded) as session:
        steps = run_steps(session)
        next(steps)
    leftover = run / "consistency" / "step_2" / "rollout"
    leftover.mkdir(parents=True)
    (leftover / "manifest.json").write_text("torn")
    (leftover.parent / "result.json").write_text("{}")
    (report,) = train(configured(world, run, *settings))
    assert report.step == 2
    (verdict,) = read_verdicts(run)
    assert verdict.verdict == "equal"


@pytest.mark.filterwarnings("default::trainfer.check.probe.sink.CaptureWarning")
def test_a_dump_that_reaches_its_limit_is_no_agreement(world, tmp_path, said):
    run = tmp_path / "run"
    settings = ("trainfer.consistency.steps=[1]", "trainfer.consistency.max_bytes=2200000")
    assert len(list(train(configured(world, run, *settings)))) == 2
    written = sum(path.stat().st_size for path in (run / "consistency" / "step_1").rglob("*.safetensors"))
    assert written <= 2_200_000 + 200_000  # a limit is noticed with the tensor that reaches it
    (verdict,) = read_verdicts(run)
    assert verdict.verdict == "incomparable"
    assert any("not whole" in text for text in said.messages)


def test_a_folder_that_cannot_be_used_costs_the_capture_and_not_the_run(world, tmp_path, said):
    run = tmp_path / "run"
    run.mkdir()
    (run / "consistency").write_text("in the way")
    reports = list(train(configured(world, run, "trainfer.consistency.steps=[1]")))
    assert len(reports) == 2
    assert any("Step 1 is not captured" in text for text in said.messages)


def test_unknown_modules_cost_the_capture_and_not_the_run(world, tmp_path, said):
    run = tmp_path / "run"
    settings = ("trainfer.consistency.steps=[1]", "trainfer.consistency.modules=['*.nothing']")
    assert len(list(train(configured(world, run, *settings)))) == 2
    assert read_verdicts(run) == ()
    assert any("'*.nothing' matches none" in text for text in said.messages)
    assert any("consistency step 1: not compared" in text for text in said.messages)


def test_a_verdict_file_that_is_damaged_is_no_verdict(tmp_path):
    for step, text in ((1, "{"), (2, "[]"), (3, '{"verdict": "equal"}')):
        folder = tmp_path / "consistency" / f"step_{step}"
        folder.mkdir(parents=True)
        Path(folder / "result.json").write_text(text)
    (tmp_path / "consistency" / "step_x").mkdir()
    assert read_verdicts(tmp_path) == ()
