"""TRL's own GRPOTrainer, two steps of a tiny random model, with the callback of the page "Attach anything".

It runs in ``.venv-trl`` (`make setup-trl`); the snippet is taken from the page and executed there.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

import trainfer
from page_code import code_under, statements
from trainfer.check.dump.reader import Dump

CLONE = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TRAINFER_TRL") or CLONE / ".venv-trl/bin/python")
pytestmark = [
    pytest.mark.trl,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"{PYTHON} is not there: make setup-trl"),
]
SAME_LENGTH = [f"{letter} plus {letter}?" for letter in "abcdefgh"]
RAGGED = [f"{letter * (1 + place)} plus?" for place, letter in enumerate("abcdefgh")]


def run(folder: Path, code: str, *, prompts=SAME_LENGTH, architecture="qwen2", processes=1, **config):
    folder.mkdir()
    (folder / "code.py").write_text(code)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes > 1
        else []
    )
    command = [
        str(PYTHON), *launcher, str(Path(__file__).with_name("trl_run.py")), "out.json", "code.py", json.dumps(config),
        json.dumps(prompts), architecture,
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "WANDB_MODE": "disabled",
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def page():
    code = code_under("attach-anything.md", "TRL")
    assert len(statements(code)) <= 5
    return code


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory, page):
    found, said = run(tmp_path_factory.mktemp("plain") / "run", page)
    return found, said


def test_two_steps_are_captured_and_agree_within_rounding(plain_run):
    found, said = plain_run
    assert sorted(found["results"]) == ["0", "1"]
    for step, result in found["results"].items():
        assert result["verdict"] in ("equal", "rounding"), result
        status = {stage["name"]: stage["status"] for stage in result["stages"]}
        assert status["tokens"] == status["weights"] == "equal"
        coverage = result["coverage"]
        assert coverage["rows_matched"] == coverage["rows_rollout"] >= 8 * 12
        assert result["logprobs"]["count"] > 8
        assert result["logprobs"]["abs_diff_max"] < 1e-5
        assert f"trainfer step {step}: {result['verdict']} (" in said
    # the prompt's rows came from the first pass, those of the response one by one from the cache
    modules = {module["module"]: module["rows"] for module in found["results"]["0"]["modules"]}
    assert modules["model.layers.1.mlp"] == found["results"]["0"]["coverage"]["rows_matched"]


def test_training_is_bitwise_the_same_without_the_callback(plain_run, page, tmp_path):
    lines = [line for line in page.splitlines() if not line.startswith(("from ", "import "))]
    code = "\n".join(lines).replace('CaptureCallback("dumps", steps=[0, 1])', "")
    assert "Capture" not in code
    without, _ = run(tmp_path / "run", code)
    assert without["results"] == {}
    assert without["weights"] == plain_run[0]["weights"]


def test_filters_that_trl_samples_with_and_does_not_score_with_are_found(page, tmp_path):
    found, said = run(tmp_path / "run", page, temperature=0.7, top_k=20, max_steps=1)
    result = found["results"]["0"]
    assert result["verdict"] == "diverged"
    assert [cause["cause"] for cause in result["causes"]] == ["logprob.filtered"]
    assert result["logprobs"]["abs_diff_mean"] > 0.01
    assert "logprob.filtered" in said


def test_padded_prompts_have_other_positions_where_trl_scores(page, tmp_path):
    """Rotary attention does not mind: only distances count. A learned table of positions does."""
    rotary, _ = run(tmp_path / "rotary", page, prompts=RAGGED, max_steps=1)
    result = rotary["results"]["0"]
    assert [cause["cause"] for cause in result["causes"]] == ["rope.positions"]
    assert result["logprobs"]["abs_diff_max"] < 1e-4
    table, _ = run(tmp_path / "table", page, prompts=RAGGED, architecture="gpt2", max_steps=1)
    result = table["results"]["0"]
    assert result["verdict"] == "diverged"
    assert result["first_divergence"]["module"] == "transformer.wpe"
    assert result["logprobs"]["abs_diff_max"] > 0.1


def test_batches_that_generate_and_score_by_turns_are_told_apart(page, tmp_path):
    found, _ = run(
        tmp_path / "run",
        page,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        steps_per_generation=2,
    )
    for result in found["results"].values():
        assert result["verdict"] in ("equal", "rounding")
        assert result["coverage"]["rows_matched"] == result["coverage"]["rows_rollout"]
    found, said = run(tmp_path / "reused", page, num_iterations=2)
    assert list(found["results"]) == ["0"]
    assert (
        "trainfer step 1: nothing was generated in the model (TRL scored completions of an earlier step)"
        in said
    )


def test_two_processes_leave_the_comparison_to_the_command(page, tmp_path):
    _, said = run(tmp_path / "run", page, processes=2, per_device_train_batch_size=4)
    for step in (0, 1):
        folder = tmp_path / f"run/dumps/step_{step}"
        line = f"`trainfer compare dumps/step_{step}/rollout dumps/step_{step}/train` compares it"
        assert said.count(line) == 1
        result = trainfer.compare(folder / "rollout", folder / "train")
        assert result.verdict in ("equal", "rounding")
        assert result.comparison.coverage.rows_matched == result.comparison.coverage.rows_rollout
        assert (
            len(list(Dump(folder / "rollout").sequences(0)))
            == len(list(Dump(folder / "train").sequences(1)))
            == 4
        )


def test_continuous_batching_is_not_captured_as_training(page, tmp_path):
    found, said = run(tmp_path / "run", page, use_transformers_continuous_batching=True, max_steps=1)
    assert found["results"] == {}
    assert "trainfer step 0: nothing was generated in the model (continuous batching)" in said
    counts = json.loads((tmp_path / "run/dumps/step_0/train/manifest.json").read_text())["counts"]
    assert (counts["calls"], counts["sequences"], counts["unknown"]) == (1, 8, 0)
