"""Compiled code runs no hooks: that is an error or a mark, never a dump that looks whole (case 34)."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny

import trainfer
from trainfer.check.dump.reader import Dump
from trainfer.check.dump.records import TensorRecord
from trainfer.check.probe.sink import CaptureWarning
from trainfer.errors import CaptureError

IDS = torch.tensor([[7, 8, 9, 10]])

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def outputs(folder: Path) -> dict[str, TensorRecord]:
    return {f"{t.module}:{t.role.value}:{t.name}:{t.occurrence}": t for t in Dump(folder).tensors(0)}


@pytest.mark.parametrize("how", ["wrapped", "wrapper", "in_place"])
def test_a_model_compiled_before_is_an_error(dump_folder: Path, how: str):
    model = tiny("llama")
    compiled = model
    if how == "in_place":
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager")
    compiled(IDS)
    target = compiled if how == "wrapper" else model
    with (
        pytest.raises(CaptureError, match=r"1 of \d+ modules fired: the model was compiled before"),
        trainfer.capture(target, dump_folder, side="train", task="statistics"),
    ):
        compiled(IDS)
    dump = Dump(dump_folder)
    assert not dump.complete
    assert "compiled before" in dump.manifest.incomplete_reasons[0]


def test_hooks_before_compilation_give_the_eager_statistics(tmp_path: Path):
    model = tiny("llama")
    with trainfer.capture(model, tmp_path / "eager", side="train", task="statistics"):
        model(IDS)
    with trainfer.capture(model, tmp_path / "early", side="train", task="statistics"):
        torch.compile(model, backend="aot_eager")(IDS)
    eager, early = outputs(tmp_path / "eager"), outputs(tmp_path / "early")
    assert eager.keys() == early.keys()
    for name, record in eager.items():
        ours, theirs = early[name].statistics, record.statistics
        assert ours is not None
        assert theirs is not None
        assert ours.max == pytest.approx(theirs.max, rel=1e-5), name
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-5), name
    counts = {name.split(":")[0] for name in eager}
    assert len(counts) == Dump(tmp_path / "eager").manifest.counts["modules_fired"]


def test_compiled_layers_are_told(dump_folder: Path):
    model = tiny("llama")
    for place in range(2):
        model.model.layers[place] = torch.compile(model.model.layers[place], backend="aot_eager")
    model(IDS)
    with (
        pytest.warns(CaptureWarning, match=r"modules never fired, and parts of the model are compiled"),
        trainfer.capture(model, dump_folder, side="train"),
    ):
        model(IDS)
    assert not Dump(dump_folder).complete
