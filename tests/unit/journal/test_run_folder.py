import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest
import yaml

from trainfer.config.schema import TrainConfig
from trainfer.errors import RunFolderError
from trainfer.train.journal import folder as folder_module
from trainfer.train.journal.folder import RunFolder
from trainfer.train.journal.metrics import MetricsLog
from trainfer.train.journal.resume import MAY_CHANGE, differences, may_change

CONFIG = {
    "actor_rollout_ref": {
        "actor": {"optim": {"lr": 1e-6}, "ppo_micro_batch_size_per_gpu": 4},
        "model": {"path": "m"},
    },
    "trainer": {"total_training_steps": 10, "logger": ["console"]},
}


def open_run(path, config=CONFIG, *, resume_mode="auto"):
    return RunFolder.open(path, config_text=yaml.safe_dump(config), plan_json="{}", resume_mode=resume_mode)


def with_value(key, value):
    config = json.loads(json.dumps(CONFIG))
    node = config
    *parents, last = key.split(".")
    for parent in parents:
        node = node[parent]
    node[last] = value
    return config


def finish_a_step(run):
    log = MetricsLog(run.metrics, resumed_step=0)
    log.append(1, {"loss": 0.5})
    log.close()


def test_a_new_folder_holds_config_and_plan(tmp_path):
    with open_run(tmp_path / "a" / "b") as run:
        assert not run.existed
        assert yaml.safe_load((run.path / "config.yaml").read_text()) == CONFIG
        assert (run.path / "plan.json").read_text() == "{}"
        run.record_start(resumed_step=0, details={"seed": 7})
        start = json.loads((run.path / "starts.jsonl").read_text())
        assert start["seed"] == 7
        assert start["versions"]["torch"]


def test_another_value_of_a_key_that_decides_the_run_is_refused_with_both_values(tmp_path):
    with open_run(tmp_path / "run") as run:
        finish_a_step(run)
    with pytest.raises(RunFolderError) as caught:
        open_run(tmp_path / "run", with_value("actor_rollout_ref.actor.optim.lr", 3e-6))
    assert "actor_rollout_ref.actor.optim.lr: 1e-06 in the folder, 3e-06 now" in str(caught.value)
    with open_run(tmp_path / "run") as run:
        assert run.existed, "the refusal changed nothing and left no lock"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.total_training_steps", 20),
        ("trainer.logger", ["tensorboard"]),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 1),
    ],
)
def test_keys_that_do_not_decide_the_run_may_change(tmp_path, key, value):
    with open_run(tmp_path / "run") as run:
        finish_a_step(run)
    with open_run(tmp_path / "run", with_value(key, value)) as run:
        assert yaml.safe_load((run.path / "config.yaml").read_text()) == with_value(key, value)


def test_a_folder_without_steps_may_be_used_for_another_configuration(tmp_path):
    with open_run(tmp_path / "run"):
        pass
    with open_run(tmp_path / "run", with_value("actor_rollout_ref.model.path", "other")):
        pass


def test_what_decides_the_numbers_may_not_change():
    decisive = """data.train_batch_size data.seed data.shuffle data.max_prompt_length trainfer.seed trainfer.exact
        actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.optim.lr actor_rollout_ref.rollout.n
        actor_rollout_ref.rollout.name actor_rollout_ref.rollout.temperature actor_rollout_ref.model.path
        actor_rollout_ref.actor.fsdp_config.dtype actor_rollout_ref.actor.fsdp_config.model_dtype
        actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype algorithm.adv_estimator
        algorithm.rollout_correction.bypass_mode actor_rollout_ref.actor.optim.lr_scheduler_type"""
    assert [key for key in decisive.split() if may_change(key)] == []


def dotted_keys(struct, prefix=""):
    import msgspec

    for field in msgspec.structs.fields(struct):
        inner = type(field.default) if isinstance(field.default, msgspec.Struct) else field.type
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield from dotted_keys(inner, f"{prefix}{field.encode_name}.")
        else:
            yield f"{prefix}{field.encode_name}"


def test_every_pattern_matches_a_key_of_the_schema():
    from fnmatch import fnmatchcase

    keys = list(dotted_keys(TrainConfig))
    assert len(keys) > 80
    assert [pattern for pattern in MAY_CHANGE if not any(fnmatchcase(key, pattern) for key in keys)] == []


def test_a_missing_key_is_a_difference():
    assert differences({"a": {"b": 1}}, {"a": {"b": 1, "c": None}}) == [("a.c", "(not set)", "None")]


def test_disable_never_overwrites_a_run(tmp_path):
    with open_run(tmp_path / "run") as run:
        finish_a_step(run)
    with pytest.raises(RunFolderError, match="already holds a run"):
        open_run(tmp_path / "run", resume_mode="disable")


def test_somebody_elses_config_yaml_is_not_overwritten(tmp_path):
    (tmp_path / "config.yaml").write_text("mine: 1")
    with pytest.raises(RunFolderError, match="not a run's"):
        open_run(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "mine: 1"


def test_a_file_in_the_way_and_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="existing file"):
        open_run(tmp_path / "file")
    with pytest.raises(RunFolderError, match=r"below a file|Not a directory"):
        open_run(tmp_path / "file" / "run")


def test_an_unwritable_parent_is_named():
    with pytest.raises(RunFolderError, match="Cannot create the run folder /proc/trainfer-run"):
        open_run(folder_module.Path("/proc/trainfer-run"))


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\x00", b"[1, 2]", b"a: [", b"!!python/object/apply:os.system [ls]"]
)
def test_a_damaged_stored_config_is_an_error_in_words(tmp_path, damage):
    with open_run(tmp_path / "run") as run:
        finish_a_step(run)
        (run.path / "config.yaml").write_bytes(damage)
    with pytest.raises(RunFolderError, match=r"config\.yaml"):
        open_run(tmp_path / "run")


def test_a_second_live_process_is_refused_and_a_killed_one_is_not_in_the_way(tmp_path):
    script = (
        "import sys, time, yaml; from pathlib import Path; from trainfer.train.journal.folder import RunFolder;"
        "run = RunFolder.open(Path(sys.argv[1]), config_text=sys.argv[2], plan_json='{}', resume_mode='auto');"
        "print('open', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run"), yaml.safe_dump(CONFIG)], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(RunFolderError, match=f"process {process.pid} on"):
            open_run(tmp_path / "run")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with open_run(tmp_path / "run") as run:
        assert run.existed


def test_little_free_space_is_a_warning(tmp_path, monkeypatch, caplog):
    usage = namedtuple("usage", "total used free")(total=10**12, used=10**12 - 5 * 10**8, free=5 * 10**8)
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda path: usage)
    with open_run(tmp_path / "run"):
        pass
    assert "0.50 GB free" in caplog.text


def test_opening_takes_no_time(tmp_path):
    start = time.perf_counter()
    with open_run(tmp_path / "run"):
        pass
    assert time.perf_counter() - start < 2
