"""``trainfer attach``: everything is checked before the run starts, and refused with one sentence."""

import sys
from pathlib import Path

import pytest

from trainfer.cli.attach import new_folder, parse_bytes, parse_passes, parse_steps
from trainfer.cli.attach_verdict import check_plan, disk_bound
from trainfer.cli.main import main
from trainfer.errors import CaptureError
from trainfer.integrations.verl import launch
from trainfer.integrations.verl.launch import Installed, environment, find_python, known_table
from trainfer.integrations.verl.settings import VARIABLE, AttachSettings, from_environment

FULL = Installed(
    python="/v/python",
    verl="0.9.1",
    vllm="0.30.0",
    trainfer=True,
    plugins=("trainfer.integrations.verl.plugin",),
)


def test_settings_travel_through_the_environment(monkeypatch):
    settings = AttachSettings(out="/o", verl="0.9.1", run_id="r", steps=None, max_bytes=5)
    monkeypatch.setenv(VARIABLE, settings.encode())
    assert from_environment() == settings
    assert settings.wants_step(7)
    monkeypatch.setenv(VARIABLE, '{"out": "/o", "colour": 1}')
    with pytest.raises(CaptureError, match="holds no settings"):
        from_environment()


def test_the_recipe_has_its_own_folder_names():
    settings = AttachSettings(out="/o", verl="0.9.1", run_id="r", prompts_only=True)
    assert settings.pass_folder(0, "update") == Path("/o/update_actor/step_0")
    assert settings.rollout_folder(0) == Path("/o/generate_sequences/step_0")
    plain = AttachSettings(out="/o", verl="0.9.1", run_id="r")
    assert plain.pass_folder(1, "update") == Path("/o/step_1/update")
    assert plain.rollout_folder(1) == Path("/o/step_1/rollout")


def test_steps_passes_and_sizes_are_read():
    assert parse_steps("1, 0") == (0, 1)
    assert parse_steps("all") is None
    assert parse_passes(None, prompts_only=False) == ("old_log_prob", "ref_log_prob", "update")
    assert parse_passes("update,old_log_prob", prompts_only=False) == ("update", "old_log_prob")
    assert parse_passes(None, prompts_only=True) == ("update",)
    assert parse_bytes("512M") == 512 * 2**20
    assert parse_bytes("2GiB") == 2 * 2**30
    assert parse_bytes("100") == 100


@pytest.mark.parametrize("text", ["", "0,", "-1", "first", "1.5", "²"])
def test_steps_that_cannot_be_are_refused(text):
    with pytest.raises(CaptureError, match="--steps"):
        parse_steps(text)


@pytest.mark.parametrize("text", ["", "0", "-4G", "much", "4X"])
def test_sizes_that_cannot_be_are_refused(text):
    with pytest.raises(CaptureError, match="--max-bytes"):
        parse_bytes(text)


def test_a_used_folder_is_refused(tmp_path):
    (tmp_path / "old").write_text("")
    with pytest.raises(CaptureError, match="not empty"):
        new_folder(tmp_path)
    assert new_folder(tmp_path / "new") == tmp_path / "new"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"verl": None}, "verl is not installed"),
        ({"verl": "0.7.0"}, "verl 0.7.0 is not known"),
        ({"trainfer": False}, "trainfer is not installed"),
        ({"vllm": None}, "vLLM is not installed"),
        ({"vllm": "0.3.0"}, "vLLM 0.3.0 is not known"),
    ],
)
def test_what_is_not_known_is_refused_with_a_sentence(missing, words):
    values = {name: getattr(FULL, name) for name in ("python", "verl", "vllm", "trainfer", "plugins")}
    with pytest.raises(CaptureError, match=words):
        known_table(Installed(**{**values, **missing}))
    assert known_table(FULL).version == "0.9.1"


def test_a_prefix_of_a_version_is_not_that_version():
    values = {name: getattr(FULL, name) for name in ("python", "verl", "trainfer", "plugins")}
    with pytest.raises(CaptureError, match="not known"):
        known_table(Installed(**values, vllm="0.300.0"))


def test_the_python_of_a_command_is_found(tmp_path, monkeypatch):
    assert find_python([sys.executable, "-m", "verl.trainer.main_ppo"]) == sys.executable
    script = tmp_path / "run"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_python(["run"]) == sys.executable
    assert Path(find_python(["bash", "run.sh"])).name.startswith("python")
    with pytest.raises(CaptureError, match="no command"):
        find_python(["no-such-command-here"])


def test_the_environment_carries_settings_and_only_where_needed_the_external_module(monkeypatch):
    settings = AttachSettings(out="/o", verl="0.9.1", run_id="r")
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    table = known_table(FULL)
    assert set(environment(settings, table, FULL)) == {VARIABLE, "TRAINFER_RUN_ID"}
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    added = environment(settings, table, FULL)
    assert added["VERL_USE_EXTERNAL_MODULES"] == "mine,trainfer.integrations.verl.plugin"


def test_a_cluster_that_is_running_gets_the_variables_as_overrides(monkeypatch):
    command = ["python3", "-m", "verl.trainer.main_ppo"]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert launch.ray_overrides(command, {"A": "b"}) == []
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    (override,) = launch.ray_overrides(command, {"A": '{"x": "it\'s"}'})
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(override)
    assert parsed.key_or_group == "ray_kwargs.ray_init.runtime_env.env_vars.A"
    assert parsed.value() == '{"x": "it\'s"}'


def test_engines_that_are_not_attached_to_are_named():
    words = ["python3", "-m", "verl.trainer.main_ppo", "actor_rollout_ref.rollout.name=sglang"]
    with pytest.raises(CaptureError, match="sglang"):
        check_plan(words, "0.9.1", prompts_only=False)
    words[-1] = "actor_rollout_ref.actor.strategy=megatron"
    with pytest.raises(CaptureError, match="megatron"):
        check_plan(words, "0.9.1", prompts_only=False)


RECIPE = [
    "python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=8",
    "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.use_remove_padding=True",
]  # fmt: skip


def test_the_recipe_is_checked_before_the_run():
    plan = check_plan(RECIPE, "0.9.1", prompts_only=True)
    assert plan is not None
    split = [word.replace("ppo_mini_batch_size=8", "ppo_mini_batch_size=4") for word in RECIPE]
    with pytest.raises(CaptureError, match="conditions do not hold"):
        check_plan(split, "0.9.1", prompts_only=True)
    settings = AttachSettings(out="/o", verl="0.9.1", run_id="r", passes=("update",), max_bytes=2**30)
    assert "8 ranks x 2 steps x 2 passes" in disk_bound(settings, plan)
    assert "= 32 GiB" in disk_bound(settings, plan)


def test_a_python_without_verl_ends_the_command_with_one_sentence(capsys, tmp_path):
    code = main(["attach", "--out", str(tmp_path / "o"), "--", sys.executable, "-m", "verl.trainer.main_ppo"])
    printed = capsys.readouterr()
    assert code == 2
    assert "verl is not installed" in printed.err
    assert "Traceback" not in printed.err
    assert not (tmp_path / "o").exists()


def test_no_command_is_an_error(capsys):
    assert main(["attach"]) == 2
    assert "got no command" in capsys.readouterr().err


def test_the_commands_exit_code_and_signal_pass_through(tmp_path):
    assert launch.run([sys.executable, "-c", "import sys; sys.exit(3)"], {}) == 3
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert launch.run([sys.executable, "-c", dies], {}) == 137
    reads = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['TRAINFER_ATTACH'])"
    assert launch.run([sys.executable, "-c", reads], {"TRAINFER_ATTACH": "x"}) == 0
    assert (tmp_path / "seen").read_text() == "x"
    with pytest.raises(CaptureError, match="cannot be started"):
        launch.run([str(tmp_path)], {})
