"""Saves behind the training, the KL weight and the data of a resumed run, and validating alone: whole small runs."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from trainfer.config.load import load_config
from trainfer.errors import CheckpointError, ConfigError, RunFolderError
from trainfer.run import run_steps, train
from trainfer.train.journal import checkpoints as store_module
from trainfer.train.journal.background import BackgroundSaves
from trainfer.train.journal.checkpoints import CheckpointStore, list_checkpoints, why_damaged
from trainfer.train.journal.metrics import read_metrics
from trainfer.train.update import checkpoint_writer
from trainfer.workers.launched import launched_by_torchrun
from trainfer.workers.session import open_session

WORDS = ["ab", "ba", "ac", "ca", "bc", "cb", "ad", "da"]
ASYNC = "actor_rollout_ref.actor.checkpoint.async_save=true"


def write_rows(path, words=WORDS, **extra):
    rows = [
        {
            "data_source": "trainfer/letters",
            "prompt": [{"role": "user", "content": word}],
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"index": index, "demonstrations": [word, word[::-1]], **extra},
        }
        for index, word in enumerate(words)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path):
    write_rows(tmp_path / "train.jsonl")
    write_rows(tmp_path / "val.jsonl", ["ab", "bd"])
    return tmp_path / "train.jsonl"


def overrides(data, run, *more):
    return [
        f"data.train_files={data}",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.dtype=fp32",
        "trainer.total_training_steps=4",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={run}",
        "trainer.device=cpu",
        "trainfer.exact=false",
        "trainfer.warmup.hidden_size=16",
        "trainfer.warmup.intermediate_size=32",
        "trainfer.warmup.num_heads=2",
        "trainfer.warmup.num_kv_heads=1",
        "trainfer.warmup.steps=5",
        *more,
    ]


def loaded(data, run, *more):
    return load_config(None, overrides(data, run, *more))


def tensors_of(run, step):
    files = sorted((run / f"checkpoints/global_step_{step}/actor").glob("*.safetensors"))
    return {name: value.tobytes() for file in files for name, value in load_file(file).items()}


def steps_saved(run):
    return [step for step, folder in list_checkpoints(run / "checkpoints") if why_damaged(folder) is None]


def test_saves_behind_the_training_hold_the_same_bits_and_any_of_them_resumes(data, tmp_path):
    plain, behind = tmp_path / "plain", tmp_path / "behind"
    list(train(loaded(data, plain)))
    reports = list(train(loaded(data, behind, ASYNC)))
    assert steps_saved(behind) == steps_saved(plain) == [1, 2, 3, 4]
    assert reports[-1].checkpoint == behind / "checkpoints/global_step_4"
    for step in (1, 3, 4):
        assert tensors_of(behind, step) == tensors_of(plain, step)
    for step in (3, 4):
        shutil.rmtree(behind / f"checkpoints/global_step_{step}")
    assert [report.step for report in train(loaded(data, behind, ASYNC))] == [3, 4]
    assert tensors_of(behind, 4) == tensors_of(plain, 4)


def test_training_goes_on_while_a_save_is_written_and_one_at_a_time_is_under_way(data, tmp_path, monkeypatch):
    """The first save cannot end before step 2 has been trained."""
    may_write, writing, most = threading.Event(), [], []
    original = checkpoint_writer.ShardFile.write

    def slow(self):
        writing.append(self)
        most.append(len(writing))
        assert may_write.wait(60)
        original(self)
        writing.pop()

    monkeypatch.setattr(checkpoint_writer.ShardFile, "write", slow)
    with open_session(loaded(data, tmp_path / "run", ASYNC, "trainer.total_training_steps=3")) as session:
        steps = run_steps(session)
        assert next(steps).checkpoint is None
        assert steps_saved(tmp_path / "run") == []
        threading.Timer(0.5, may_write.set).start()
        next(steps)  # waits for the first save before it begins its own
        assert steps_saved(tmp_path / "run")[0] == 1
        list(steps)
    assert steps_saved(tmp_path / "run") == [1, 2, 3]
    assert max(most) == 1


def test_a_full_disk_is_a_warning_behind_the_training_and_an_error_in_the_last_save(
    data, tmp_path, monkeypatch, caplog
):
    full = {"is": True}
    original = checkpoint_writer.ShardFile.write

    def write(self):
        if full["is"]:
            raise OSError(28, "No space left on device")
        original(self)

    monkeypatch.setattr(checkpoint_writer.ShardFile, "write", write)
    run = tmp_path / "run"
    with open_session(loaded(data, run, ASYNC)) as session, caplog.at_level(logging.WARNING):
        steps = run_steps(session)
        next(steps), next(steps)
        assert "The checkpoint of step 1 was not written" in caplog.text
        assert "No space left" in caplog.text
        full["is"] = False
        next(steps)
        full["is"] = True
        with pytest.raises(CheckpointError, match="step 4 was not written"):
            next(steps)
    assert steps_saved(run) == [3]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["global_step_3"]


def test_a_save_that_cannot_be_published_keeps_the_older_ones(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, keep=None)
    saves = BackgroundSaves(store)

    def start(folder):
        (folder / "weights").write_bytes(b"abc")

    def written(*, wait):
        return True

    assert saves.begin(1, start, written) is None
    assert saves.finish(required=False) == tmp_path / "global_step_1"
    monkeypatch.setattr(store_module, "_write_marker", fail)
    saves.begin(2, start, written)
    with caplog.at_level(logging.WARNING):
        assert saves.finish(required=False) is None
    assert "step 2 was not written" in caplog.text
    saves.begin(3, start, written)
    with pytest.raises(CheckpointError, match="step 3"):
        saves.finish(required=True)
    saves.close()
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def fail(*arguments):
    raise OSError(28, "No space left on device")


SLOW = """
import time
from trainfer.train.update import checkpoint_writer
original = checkpoint_writer.ShardFile.write
def slow(self):
    original(self)
    print("WRITTEN", flush=True)
    time.sleep(3)
checkpoint_writer.ShardFile.write = slow
import sys
from trainfer.cli.main import main
sys.exit(main())
"""


def test_a_kill_in_the_middle_of_a_save_falls_back_to_the_checkpoint_before_it(data, tmp_path):
    run, straight = tmp_path / "run", tmp_path / "straight"
    list(train(loaded(data, straight)))
    list(train(loaded(data, run, "trainer.total_training_steps=1")))
    (tmp_path / "empty.yaml").write_text("data: {}\n")
    words = ["train", str(tmp_path / "empty.yaml"), *overrides(data, run, ASYNC)]
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *words], stdout=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "WRITTEN" in line:
                process.send_signal(signal.SIGKILL)
                break
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == [".saving-global_step_2", "global_step_1"]
    assert list((run / "checkpoints/.saving-global_step_2/actor").glob("*.safetensors"))
    reports = list(train(loaded(data, run, ASYNC)))
    assert [report.step for report in reports] == [2, 3, 4]
    assert tensors_of(run, 4) == tensors_of(straight, 4)
    assert not list((run / "checkpoints").glob(".saving*"))


def test_edited_data_under_the_same_name_is_refused_on_resume(data, tmp_path):
    run = tmp_path / "run"
    list(train(loaded(data, run, "trainer.total_training_steps=1")))
    write_rows(data)  # written anew, the same rows
    list(train(loaded(data, run, "trainer.total_training_steps=2")))
    write_rows(data, [*WORDS[:-1], "dd"])
    with pytest.raises(RunFolderError, match=r"hold other prompts .*data_sha256"):
        list(train(loaded(data, run)))
    assert [step for step, _ in read_metrics(run / "metrics.jsonl")] == [1, 2]


def test_the_vocabulary_of_a_warm_up_does_not_depend_on_validation_data(data, tmp_path):
    from trainfer.workers.inputs import read_tokenizer

    plain = loaded(data, tmp_path / "run").config
    validated = loaded(data, tmp_path / "run", f"data.val_files={tmp_path / 'other.jsonl'}").config
    write_rows(tmp_path / "other.jsonl", ["xyz"])
    assert read_tokenizer(plain).get_vocab() == read_tokenizer(validated).get_vocab()


def test_an_adaptive_kl_weight_goes_on_where_the_checkpoint_left_it(data, tmp_path):
    more = (
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=50",
    )
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    list(train(loaded(data, straight, *more)))
    list(train(loaded(data, resumed, *more, "trainer.total_training_steps=2")))
    list(train(loaded(data, resumed, *more, ASYNC)))
    name = "actor/reward_kl_penalty_coeff"
    weights = [metrics[name] for _, metrics in read_metrics(straight / "metrics.jsonl")]
    assert weights[0] == 0.001
    assert len(set(weights)) == 4
    assert [metrics[name] for _, metrics in read_metrics(resumed / "metrics.jsonl")] == weights
    assert tensors_of(resumed, 4) == tensors_of(straight, 4)
    (resumed / "checkpoints/global_step_4/kl_control.json").unlink()
    shutil.rmtree(resumed / "checkpoints/global_step_4")
    with (resumed / "checkpoints/global_step_2/kl_control.json").open() as file:
        assert json.load(file)["weight"] == weights[2]


def test_val_only_validates_with_the_newest_weights_and_stops(data, tmp_path, caplog):
    run = tmp_path / "run"
    list(train(loaded(data, run, "trainer.total_training_steps=2")))
    before = (run / "metrics.jsonl").read_bytes()
    only = (
        f"data.val_files={tmp_path / 'val.jsonl'}",
        "trainer.val_only=true",
        "trainer.val_before_train=true",
    )
    with caplog.at_level(logging.INFO):
        assert list(train(loaded(data, run, *only))) == []
    assert "val-core/trainfer/letters" in caplog.text
    assert (run / "metrics.jsonl").read_bytes() == before
    assert steps_saved(run) == [1, 2]
    responses = next(path for path in (run / "rollouts").iterdir() if "val" in path.name)
    assert len(responses.read_text().splitlines()) == 2


def test_a_wrong_value_inside_a_section_is_named_by_its_dotted_key(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*overrides(tmp_path / "d", tmp_path), "trainfer.warmup.num_heads=3"])
    assert "trainfer.warmup: num_kv_heads=1 " in str(caught.value) or "trainfer.warmup: hidden_size" in str(
        caught.value
    )
    assert "$" not in str(caught.value)


@pytest.mark.parametrize("port", ["0", "70000", "-1"])
def test_a_port_that_nobody_has_chosen_is_refused(port):
    variables = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=rf"MASTER_PORT={port}: .*--standalone"):
        launched_by_torchrun(variables)


def test_nothing_waits_for_a_save_longer_than_the_save(tmp_path):
    """What a thread of the journal has in hand ends before the process does."""
    store = CheckpointStore(tmp_path, keep=None)
    saves = BackgroundSaves(store)
    asked = []

    def written(*, wait):
        asked.append(wait)
        return wait or len(asked) > 2

    saves.begin(1, lambda folder: (folder / "a").write_text("a"), written)
    assert saves.poll() is None
    assert saves.poll() is None
    assert saves.poll() is None
    deadline = time.monotonic() + 60
    while (found := saves.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == Path(tmp_path / "global_step_1")
    assert asked == [False, False, False]
    saves.close()
