"""Cases that people had: a dump folder used again (36), odd values (38)."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_models import tiny
from torch import Tensor, nn

import trainfer
from trainfer.check.dump.reader import Dump
from trainfer.check.dump.records import Role
from trainfer.check.dump.tensors import load_tensor
from trainfer.errors import DumpError

IDS = torch.tensor([[7, 8, 9, 10]])


def run(folder: Path, steps: list[int], seed: int, pass_name: str | None = None) -> None:
    torch.manual_seed(seed)
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.normal_()
    with trainfer.capture(
        model, folder, side="train", pass_name=pass_name, task="statistics", steps=steps
    ) as cap:
        for _ in range(3):
            model(IDS)
            cap.step()


def test_a_second_run_into_the_folder_is_refused_and_the_first_stays(tmp_path: Path):
    run(tmp_path / "dump", [1, 2], seed=1)
    before = {path: path.read_bytes() for path in (tmp_path / "dump").rglob("*") if path.is_file()}
    with pytest.raises(DumpError, match="two captures never share a folder"):
        run(tmp_path / "dump", [1], seed=2)
    assert {path: path.read_bytes() for path in (tmp_path / "dump").rglob("*") if path.is_file()} == before
    assert {t.step for t in Dump(tmp_path / "dump").tensors(0)} == {1, 2}


def test_stages_do_not_pile_up(tmp_path: Path):
    counts = []
    for stage in ("actor_compute_log_prob", "actor_update"):
        run(tmp_path / stage, [1, 2], seed=1, pass_name=stage)
        dump = Dump(tmp_path / stage)
        assert {t.pass_name for t in dump.tensors(0)} == {stage}
        counts.append(sum(1 for _ in dump.tensors(0)))
    assert counts[0] == counts[1] > 0


class Passing(nn.Module):
    """Gives back what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value)


ODD = {
    "bf16_exact": torch.tensor([1.0, -2.5, 0.15625], dtype=torch.bfloat16),
    "with_nan": torch.tensor([math.nan, 1.0, math.inf, -3.0]),
    "empty": torch.tensor([]),
    "int": torch.tensor([3, -7]),
    "bool": torch.tensor([True, False]),
    "zero_dim": torch.tensor(2.0),
}


@pytest.mark.parametrize("name", list(ODD))
def test_odd_tensors_round_trip_bit_for_bit(dump_folder: Path, name: str):
    with trainfer.capture(Passing(), dump_folder, side="train") as cap:
        cap._model(ODD[name])
    dump = Dump(dump_folder)
    record = next(t for t in dump.tensors(0) if t.role is Role.OUTPUT)
    read = load_tensor(dump, 0, record)
    assert read.dtype == ODD[name].dtype
    assert read.shape == ODD[name].shape
    assert (
        torch.equal(read.reshape(-1).view(torch.uint8), ODD[name].reshape(-1).view(torch.uint8))
        or not read.numel()
    )


def strict(text: str) -> object:
    def refuse(constant: str) -> float:
        raise AssertionError(f"bare {constant}")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", list(ODD))
def test_statistics_of_odd_tensors_are_strict_json(dump_folder: Path, name: str):
    with trainfer.capture(Passing(), dump_folder, side="train", task="statistics") as cap:
        cap._model(ODD[name])
    for line in (dump_folder / "rank0/index.jsonl").read_text().splitlines():
        strict(line[9:])
    strict((dump_folder / "manifest.json").read_text())
    taken = next(t for t in Dump(dump_folder).tensors(0) if t.role is Role.OUTPUT).statistics
    assert taken is not None
    if name == "with_nan":
        assert (taken.nan, taken.inf, taken.min, taken.max, taken.mean) == (1, 1, -3.0, 1.0, -1.0)
        assert taken.norm == pytest.approx(math.sqrt(10))
    if name == "empty":
        assert (taken.count, taken.min) == (0, None)
    if name == "int":
        assert (taken.min, taken.max) == (-7, 3)


def test_names_and_config_keep_their_letters(dump_folder: Path):
    with trainfer.capture(Passing(), dump_folder, side="train") as cap:
        cap._model(torch.ones(1))
        cap.describe_run({"correct": True, "rank": 3, "answer": "七十二 ✓"})
    assert "七十二 ✓" in (dump_folder / "manifest.json").read_text()
    config = Dump(dump_folder).manifest.config
    assert config["correct"] is True
    assert config["rank"] == 3
