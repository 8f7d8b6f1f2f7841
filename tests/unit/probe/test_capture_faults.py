"""Whatever happens to a capture, the program goes on, and the dump says what it lacks."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_models import tiny

import trainfer
from trainfer.check.dump.reader import DamagedRecordError, Dump
from trainfer.check.dump.tensors import load_tensor
from trainfer.check.probe.sink import CaptureWarning
from trainfer.errors import CaptureError, DumpError

IDS = torch.tensor([[7, 8, 9, 10]])

ENDLESS = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from tiny_models import tiny
import trainfer
model = tiny("llama")
with trainfer.capture(model, sys.argv[1], side="train", backward=True):
    while True:
        model(torch.tensor([[7, 8, 9, 10]] * 8)).logits.sum().backward()
        print("step", flush=True)
"""


@pytest.fixture
def model():
    return tiny("llama")


def read_all(dump: Dump) -> int:
    return sum(load_tensor(dump, 0, record).numel() > 0 for record in dump.tensors(0))


def test_a_killed_capture_is_read_up_to_its_last_whole_record(dump_folder: Path):
    here = str(Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(dump_folder), here], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stdout is not None
    for _ in range(12):
        assert child.stdout.readline() == "step\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    dump = Dump(dump_folder)
    assert not dump.complete
    assert dump.manifest.finished is None
    calls = dump.calls(0)
    assert len(calls) >= 10
    assert read_all(dump) > 10 * 30
    assert all("torn" in problem for problem in dump.problems)
    table = dump.row_tables(0)[calls[5].table]
    assert dump.rows(0, table)["position"].tolist() == [0, 1, 2, 3] * 8


def run_until_full(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    """Forwards that write more than the disk takes; gives the last logits."""
    logits = torch.empty(0)
    with trainfer.capture(model, folder, side="train", level="mix"):
        for _ in range(40):
            logits = model(IDS.repeat(4, 4)).logits
    return logits


def check_full(model: torch.nn.Module, folder: Path) -> None:
    expected = model(IDS.repeat(4, 4)).logits
    with pytest.warns(CaptureWarning, match="cannot be written any more"):
        logits = run_until_full(model, folder)
    assert torch.equal(logits, expected)
    dump = Dump(folder)
    assert not dump.complete
    assert read_all(dump) > 0
    assert dump.problems == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_ends_the_capture_and_not_the_program(model, tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        check_full(model, small / "dump")
        assert (
            "No space left" in " ".join(Dump(small / "dump").manifest.incomplete_reasons)
            or not Dump(small / "dump").complete
        )
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_file_size_limit_ends_the_capture_and_not_the_program(model, dump_folder: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, hard))
    try:
        check_full(model, dump_folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert "File too large" in Dump(dump_folder).manifest.incomplete_reasons[0]


@pytest.mark.parametrize("where", ["file/dump", "/proc/nowhere/dump", "/dev/null"])
def test_an_unwritable_folder_is_a_warning_and_nothing_else(model, tmp_path: Path, where: str):
    (tmp_path / "file").write_text("in the way")
    expected = model(IDS).logits
    cap = trainfer.capture(model, tmp_path / where, side="train", backward=True)
    with pytest.warns(CaptureWarning, match="cannot be written"):
        cap.__enter__()
    assert torch.equal(model(IDS).logits, expected)
    cap.record_logprobs(sequences=[[1, 2]], prompt_lengths=[1], logprobs=[[-0.5]])
    cap.step()
    cap.__exit__(None, None, None)


def test_a_used_folder_is_refused_and_a_run_id_makes_a_new_one(model, tmp_path: Path):
    for _ in range(2):
        with trainfer.capture(model, tmp_path / "{run_id}", side="train") as cap:
            model(IDS)
        assert Dump(cap.folder).complete
    assert len(list(tmp_path.iterdir())) == 2
    with (
        pytest.raises(DumpError, match="two captures never share a folder"),
        trainfer.capture(model, cap.folder, side="train"),
    ):
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_a_captured_failure_keeps_what_came_before(model, dump_folder: Path):
    def program() -> None:
        with trainfer.capture(model, dump_folder, side="train"):
            model(IDS)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        program()
    dump = Dump(dump_folder)
    assert dump.manifest.incomplete_reasons == ("the program raised ZeroDivisionError: division by zero",)
    assert read_all(dump) > 30


def test_a_forward_that_fails_leaves_the_next_call_whole(model, dump_folder: Path):
    with trainfer.capture(model, dump_folder, side="train"):
        with pytest.raises(IndexError):
            model(torch.tensor([[7, 10_000]]))
        model(IDS)
    dump = Dump(dump_folder)
    assert dump.complete
    assert {t.module for t in dump.tensors(0) if t.call == 1} >= {"lm_head", "model.norm"}


def test_no_forward_at_all_is_an_error_and_never_an_empty_dump(model, dump_folder: Path):
    with (
        pytest.raises(CaptureError, match=r"0 of \d+ modules fired: no forward call"),
        trainfer.capture(model, dump_folder, side="train"),
    ):
        pass
    assert not Dump(dump_folder).complete


def test_max_bytes_stops_keeping_values(model, dump_folder: Path):
    def program() -> None:
        with trainfer.capture(model, dump_folder, side="train", max_bytes=20_000):
            model(IDS.repeat(4, 1))
            model(IDS.repeat(4, 1))

    with pytest.warns(CaptureWarning, match="max_bytes=20000"):
        program()
    dump = Dump(dump_folder)
    assert not dump.complete
    assert 10_000 < sum(t.blob.nbytes for t in dump.tensors(0) if t.blob) < 60_000


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"side": "both"}, "'rollout', 'train'"),
        ({"level": "L7"}, "'L0', 'L1', 'mix'"),
        ({"task": "md5"}, "'tensor', 'statistics', 'sketch'"),
        ({"weights": "some"}, "'fingerprint', 'full'"),
        ({"pass_name": "../x"}, "letters, digits or underscores"),
        ({"steps": [-1]}, "numbers from 0 on"),
        ({"ranks": []}, "numbers from 0 on"),
        ({"token_range": (5, 2)}, "token_range=\\(5, 2\\)"),
        ({"weights_version": -1}, "counts optimizer steps"),
        ({"max_bytes": 0}, "above 0"),
        ({"modules": ["model.layer.0"]}, "the nearest name is 'model.layers.0'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(
    model, tmp_path: Path, wrong: dict[str, object], told: str
):
    arguments = {"side": "train", **wrong}
    with pytest.raises(CaptureError, match=told):
        trainfer.capture(model, tmp_path / "d", **arguments)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"logprobs": [[-1.0, -1.0]]}, "1 response tokens, but there are 2 log-probs"),
        ({"prompt_lengths": [5]}, "prompt of 5"),
        ({"prompt_lengths": [1, 1]}, "2 prompt_lengths"),
        ({"sampling": {"temprature": 1.0}}, "temprature"),
        ({"request_ids": ["a", "b"]}, "2 request_ids"),
    ],
)
def test_log_probs_that_do_not_fit_are_refused(model, dump_folder: Path, wrong: dict[str, object], told: str):
    arguments = {"sequences": [[1, 2]], "prompt_lengths": [1], "logprobs": [[-0.5]], **wrong}
    with trainfer.capture(model, dump_folder, side="train") as cap:
        model(IDS)
        with pytest.raises(CaptureError, match=told):
            cap.record_logprobs(**arguments)
        cap.record_logprobs(
            sequences=[[1, 2]], prompt_lengths=[1], logprobs=[[float("-inf")]], sampling={"temperature": 0.5}
        )
    (record,) = Dump(dump_folder).sequences(0)
    assert record.logprobs == ("-inf",)
    assert record.sampling == {"temperature": 0.5, "top_k": -1, "top_p": 1.0, "min_p": 0.0}


def test_every_byte_flip_in_a_shard_is_found_or_harmless(model, dump_folder: Path):
    with trainfer.capture(model, dump_folder, side="train", modules=["model.norm"]):
        model(IDS)
    shard = next((dump_folder / "rank0/step0").glob("forward-*.safetensors"), None) or next(
        (dump_folder / "rank0/step0").glob("update-*.safetensors")
    )
    whole = shard.read_bytes()
    count = read_all(Dump(dump_folder))
    found = 0
    for place in range(64 * 1024, len(whole), 97):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        shard.write_bytes(damaged)
        dump = Dump(dump_folder)
        read = 0
        for record in dump.tensors(0):
            try:
                load_tensor(dump, 0, record)
                read += 1
            except DamagedRecordError:
                found += 1
        assert read >= count - 3
    assert found > 0


class Careless(torch.nn.Module):
    """Takes a mask that fits nothing, and does not look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Embedding(100, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids)


def test_arguments_that_make_no_sense_cost_the_keys_and_not_the_program(dump_folder: Path):
    model = Careless()
    with (
        pytest.warns(CaptureWarning, match="rows of a forward call could not be read"),
        trainfer.capture(model, dump_folder, side="train"),
    ):
        model(input_ids=IDS, attention_mask=torch.ones(3, 2))
    dump = Dump(dump_folder)
    assert read_all(dump) == 5
    assert dump.calls(0)[0].table == -1


def test_rows_that_do_not_fit_the_call_cost_the_keys_and_not_the_program(model, dump_folder: Path):
    def rows() -> trainfer.Rows:
        return trainfer.Rows(token_ids=[1], sequence_lengths=[2])

    with (
        pytest.warns(CaptureWarning, match="sequence_lengths are at least 1"),
        trainfer.capture(model, dump_folder, side="train", rows=rows),
    ):
        model(IDS)
    assert not Dump(dump_folder).complete
