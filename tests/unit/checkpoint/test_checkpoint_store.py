import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainfer.errors import CheckpointError
from trainfer.train.journal.checkpoints import CheckpointStore, why_damaged


def contents(step):
    def write(folder: Path):
        (folder / "actor").mkdir()
        (folder / "actor" / "weights.bin").write_bytes(bytes([step]) * 5000)
        (folder / "state.json").write_text(json.dumps({"step": step}))

    return write


def store_with(tmp_path, *steps, keep=None):
    store = CheckpointStore(tmp_path / "checkpoints", keep=keep)
    for step in steps:
        assert store.save(step, contents(step), required=True) == store.folder / f"global_step_{step}"
    return store


def visible(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_the_newest_is_by_number_not_by_name(tmp_path):
    assert store_with(tmp_path, 9, 10).newest().step == 10


def test_no_folder_and_no_checkpoint_is_none(tmp_path):
    assert CheckpointStore(tmp_path / "none", keep=None).newest() is None


def test_keep_removes_the_oldest_after_the_new_one_is_whole(tmp_path):
    store = store_with(tmp_path, 1, 2, 3, 4, keep=2)
    assert visible(store) == ["global_step_3", "global_step_4"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda f: (f / "actor/weights.bin").write_bytes(b"x" * 4999),
            "weights.bin has 4999 bytes instead of 5000",
        ),
        (lambda f: (f / "actor/weights.bin").unlink(), "weights.bin is missing"),
        (lambda f: flip_a_bit(f / "actor/weights.bin"), "weights.bin has changed"),
        (lambda f: (f / "complete.json").unlink(), "did not finish"),
        (lambda f: (f / "complete.json").write_bytes(b'{"schema": "trainf'), "cannot be read"),
        (lambda f: (f / "complete.json").write_text("[]"), "not of the form"),
        (lambda f: (f / "complete.json").write_text("[" * 200_000), "cannot be read"),
        (lambda f: escape(f / "complete.json"), "not of the form"),
        (lambda f: to_link(f / "state.json"), "state.json is missing"),
    ],
)
def test_a_damaged_newest_falls_back_and_says_which_file_and_why(tmp_path, caplog, damage, reason):
    store = store_with(tmp_path, 1, 2, 3)
    older = {
        path: path.read_bytes()
        for path in sorted((store.folder / "global_step_2").rglob("*"))
        if path.is_file()
    }
    damage(store.folder / "global_step_3")
    found = store.newest()
    assert found.step == 2
    assert reason in found.skipped[0].reason
    assert reason in caplog.text
    assert "global_step_3" in caplog.text
    assert {path: path.read_bytes() for path in older} == older
    assert visible(store) == ["global_step_1", "global_step_2", "global_step_3"], (
        "nothing is moved or removed"
    )


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[1234] ^= 8
    path.write_bytes(data)


def escape(path):
    marker = json.loads(path.read_text())
    marker["files"]["../../secret"] = {"bytes": 1, "sha256": "00"}
    path.write_text(json.dumps(marker))


def to_link(path):
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def test_saving_over_a_damaged_one_sets_it_aside(tmp_path, caplog):
    store = store_with(tmp_path, 1, 2)
    flip_a_bit(store.folder / "global_step_2" / "actor" / "weights.bin")
    store.save(2, contents(2), required=True)
    assert visible(store) == ["global_step_1", "global_step_2", "set_aside-global_step_2-1"]
    assert store.newest().step == 2


def test_a_later_checkpoint_of_a_given_up_future_is_set_aside(tmp_path):
    store = store_with(tmp_path, 2, 4, 6)
    store.set_aside_after(2)
    assert store.newest().step == 2
    store.save(4, contents(4), required=True)
    assert store.newest().step == 4


def test_leftovers_of_killed_processes_go_and_other_peoples_folders_stay(tmp_path):
    store = store_with(tmp_path, 1)
    for name, mark in (
        (".saving-global_step_2", True),
        (".removing-global_step_0", True),
        (".saving-global_step_5", False),
    ):
        (store.folder / name).mkdir()
        (store.folder / name / ("weights" if not mark else ".trainfer")).touch()
    (store.folder / ".saving-mine").mkdir()
    (store.folder / "notes").mkdir()
    store.remove_leftovers()
    assert visible(store) == [".saving-global_step_5", ".saving-mine", "global_step_1", "notes"]


def test_a_failed_save_keeps_the_older_ones_and_leaves_nothing(tmp_path, caplog):
    store = store_with(tmp_path, 1, keep=1)

    def full(folder):
        (folder / "weights.bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    assert store.save(2, full, required=False) is None
    assert "step 2 was not written" in caplog.text
    assert "No space left on device" in caplog.text
    assert visible(store) == ["global_step_1"]
    with pytest.raises(CheckpointError, match="older checkpoints are untouched"):
        store.save(2, full, required=True)
    assert store.newest().step == 1


def test_a_mistake_of_ours_is_not_taken_for_a_full_disk(tmp_path):
    store = store_with(tmp_path, 1)

    def wrong(folder):
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        store.save(2, wrong, required=False)
    assert visible(store) == ["global_step_1"]


KILLED = """
import sys
from pathlib import Path
from trainfer.train.journal.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
store.remove_leftovers()
found = store.newest()
step = found.step if found else 0
def write(folder):
    (folder / "actor").mkdir()
    for part in range(4):
        (folder / "actor" / f"part{part}").write_bytes(bytes([step % 251]) * 200_000)
print("ready", flush=True)
while True:
    step += 1
    store.save(step, write, required=True)
"""


def test_sigkill_at_any_moment_leaves_the_newest_whole_one(tmp_path):
    """Twelve kills; each start goes on from what the one before left."""
    moments = random.Random(1)
    folder, last, in_the_middle = tmp_path / "checkpoints", 0, 0
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE)
        with process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0.005, 0.12))
            os.kill(process.pid, signal.SIGKILL)
        in_the_middle += any(path.name.startswith(".") for path in folder.glob("*"))
        found = CheckpointStore(folder, keep=2).newest()
        assert found is None or (found.skipped == () and found.step >= last), "every visible one is whole"
        last = found.step if found else 0
    assert last > 0
    assert in_the_middle >= 3, "most kills hit a save"
    assert why_damaged(folder / f"global_step_{last}") is None
    store = CheckpointStore(folder, keep=2)
    store.remove_leftovers()
    assert all(name.startswith("global_step_") for name in visible(store))
