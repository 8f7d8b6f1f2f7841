"""msProbe's dumps are read, compared with our engine, and written; what is damaged or hostile is told."""

import json
import math
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import trainfer
from trainfer.check.compare.source import DumpSide
from trainfer.check.dump.reader import DamagedRecordError
from trainfer.check.dump.records import Role, Task
from trainfer.errors import DumpError
from trainfer.integrations.msprobe.names import parse_name, statistics_of
from trainfer.integrations.msprobe.reader import MsprobeSide, is_msprobe_dump
from trainfer.integrations.msprobe.writer import write_msprobe

GOLDEN = Path(__file__).parents[2] / "golden" / "msprobe"
FAULT = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("task", ["tensor", "stat"])
def test_the_disturbed_weight_is_named(task: str):
    result = trainfer.compare(GOLDEN / f"{task}_L0_a", GOLDEN / f"{task}_L0_b")
    first = result.first_divergence
    assert (result.verdict, first.stage, first.module) == ("diverged", "weights", FAULT)
    off = {module.module for module in result.comparison.modules if module.status.value == "diverged"}
    assert FAULT in off
    assert "model.layers.1.mlp.up_proj" not in off


@pytest.mark.parametrize("task", ["tensor", "stat"])
def test_a_dump_equals_itself(task: str):
    result = trainfer.compare(GOLDEN / f"{task}_L0_a", GOLDEN / f"{task}_L0_a")
    assert result.verdict == "equal"
    assert result.comparison.coverage.how_matched.keys() == {"order"}


def test_without_weights_the_module_is_still_the_first(tmp_path: Path):
    """msProbe passes this fault: its rule needs good inputs and counts the weight as one."""
    for name in ("a", "b"):
        shutil.copytree(GOLDEN / f"tensor_L0_{name}", tmp_path / name)
        path = tmp_path / name / "step0/rank0/dump.json"
        dump = json.loads(path.read_text())
        for record in dump["data"].values():
            record.pop("parameters", None)
        path.write_text(json.dumps(dump))
    result = trainfer.compare(tmp_path / "a", tmp_path / "b")
    assert (result.first_divergence.stage, result.first_divergence.module) == ("modules", FAULT)


def test_names_are_taken_apart():
    name = parse_name("Module.model.layers.1.mlp.down_proj.Linear.forward.3")
    assert (name.module, name.kind, name.phase, name.call) == (FAULT, "Linear", "forward", 3)
    function = parse_name("Functional.silu.0.backward")
    assert (function.module, function.function, function.phase) == ("", "Functional.silu", "backward")
    assert parse_name("nonsense") is None


def test_every_tensor_has_its_role_and_place():
    side = MsprobeSide(GOLDEN / "stat_L0_a")
    records = list(side.tensors(0))
    assert {record.task for record in records} == {Task.STATISTICS}
    embedding = [r for r in records if r.module == "model.embed_tokens" and r.role is Role.OUTPUT]
    assert [(r.shape, r.dtype, r.name) for r in embedding] == [((1, 8, 16), "F32", "0")]
    assert {r.role for r in records} == {
        Role.INPUT, Role.OUTPUT, Role.INPUT_GRADIENT, Role.OUTPUT_GRADIENT, Role.PARAMETER_GRADIENT,
    }  # fmt: skip
    assert embedding[0].statistics.max == 0.04814822971820831


def test_statistics_that_are_missing_or_odd():
    assert statistics_of({"Max": 1, "Min": 0, "Mean": None}, (2,)) is None
    odd = statistics_of({"Max": math.nan, "Min": -math.inf, "Mean": None, "Norm": None}, (2, 3))
    assert (odd.count, odd.nan, odd.inf, odd.max, odd.min) == (6, 1, 1, None, None)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "tensor_L0_a", tmp_path / "damaged")
    return tmp_path / "damaged"


def tensor_file(folder: Path) -> Path:
    name = f"Module.{FAULT}.Linear.forward.0.output.0.pt"
    return folder / "step0/rank0/dump_tensor_data" / name


class Exploit:
    def __reduce__(self):
        return (print, ("must never run",))


def missing(path: Path) -> None:
    path.unlink()


def corrupt(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 this is no archive")


def executable_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Exploit()))


def other_shape(path: Path) -> None:
    torch.save(torch.zeros(3), path)


def no_tensor(path: Path) -> None:
    torch.save({"a": 1}, path)


@pytest.mark.parametrize("damage", [missing, corrupt, executable_pickle, other_shape, no_tensor])
def test_a_damaged_file_is_unreadable_and_no_pass(damaged: Path, damage, capsys: pytest.CaptureFixture[str]):
    damage(tensor_file(damaged))
    result = trainfer.compare(GOLDEN / "tensor_L0_a", damaged)
    statuses = {module.module: module.status.value for module in result.comparison.modules}
    assert statuses[FAULT] == "unreadable"
    assert (result.verdict, result.exit_code) == ("incomparable", 2)
    assert "must never run" not in capsys.readouterr().out


def test_a_nan_that_the_statistics_do_not_show_is_found(damaged: Path):
    tensor = torch.load(tensor_file(damaged), weights_only=True)
    tensor[0, 0, 0] = math.nan
    torch.save(tensor, tensor_file(damaged))
    assert trainfer.compare(GOLDEN / "tensor_L0_a", damaged).verdict == "diverged"


def test_a_path_as_file_name_is_not_opened(damaged: Path):
    path = damaged / "step0/rank0/dump.json"
    path.write_text(
        path.read_text().replace('"data_name": "Module.lm_head', '"data_name": "../../Module.lm_head')
    )
    side = MsprobeSide(damaged)
    assert any("is not opened" in problem for problem in side.problems)
    assert trainfer.compare(GOLDEN / "tensor_L0_a", damaged).verdict == "incomparable"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"data": {}}', '{"task": "tensor"}'])
def test_a_broken_dump_json_is_one_message(damaged: Path, text: str):
    (damaged / "step0/rank0/dump.json").write_text(text)
    with pytest.raises(DumpError, match=r"dump\.json"):
        MsprobeSide(damaged)


def test_folders_are_recognised(tmp_path: Path):
    assert is_msprobe_dump(GOLDEN / "stat_L0_a")
    assert is_msprobe_dump(GOLDEN / "stat_L0_a/step0")
    assert is_msprobe_dump(GOLDEN / "stat_L0_a/step0/rank0")
    assert not is_msprobe_dump(tmp_path)


def test_what_we_capture_can_be_written_for_msprobe_and_read_back(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with trainfer.capture(model, tmp_path / "ours", side="train", pass_name="update", backward=True):
        model(x).sum().backward()
    write_msprobe(DumpSide(tmp_path / "ours"), tmp_path / "theirs")
    side = MsprobeSide(tmp_path / "theirs")
    outputs = [r for r in side.tensors(0) if r.role is Role.OUTPUT and r.module == "2"]
    assert torch.equal(side.load(0, outputs[0]), model(x).detach())
    names = json.loads((tmp_path / "theirs/step0/rank0/dump.json").read_text())["data"]
    assert {
        "Module.0.Linear.forward.0",
        "Module.2.Linear.backward.0",
        "Module.0.Linear.parameters_grad.0",
    } <= set(names)
    assert trainfer.compare(tmp_path / "theirs", tmp_path / "theirs").verdict == "equal"
    with pytest.raises(DumpError, match="not empty"):
        write_msprobe(DumpSide(tmp_path / "ours"), tmp_path / "theirs")


def test_a_record_without_values_cannot_be_loaded():
    side = MsprobeSide(GOLDEN / "stat_L0_a")
    with pytest.raises(DamagedRecordError, match="without its values"):
        side.load(0, next(iter(side.tensors(0))))
