"""Where msProbe 26.2.0 says `pass` (or `error`) wrongly, and what trainfer says of the same files.

Each of msProbe's answers was seen with its own command on such dumps; docs/msprobe.md lists them.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import trainfer
from trainfer import PrecisionDebugger

GOLDEN = Path(__file__).parents[2] / "golden" / "msprobe"
IDS = torch.arange(8)[None] + 5


def qwen3(attention: str = "eager") -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config)


def dump(model: nn.Module, folder: Path, *, task: str = "tensor", level: str = "L0") -> Path:
    """Forward only: what the two sides of a verl run can show."""
    debugger = PrecisionDebugger(task=task, level=level, dump_path=folder)
    try:
        debugger.start(model)
        with torch.no_grad():
            model(input_ids=IDS, use_cache=False)
    finally:
        PrecisionDebugger.close()
    return folder


def edited(source: Path, target: Path, edit) -> Path:
    shutil.copytree(source, target)
    path = target / "step0/rank0/dump.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return target


def leaves(value: object) -> list[dict]:
    if isinstance(value, dict) and value.get("type") == "torch.Tensor":
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [leaf for item in items for leaf in leaves(item)]


def without_maximum(data: dict) -> None:
    for leaf in leaves(data["data"]):
        del leaf["Max"]


def test_nothing_matches_is_no_pass(tmp_path: Path):
    """msProbe: 636 rows, all `pass`, exit 0."""
    functions = dump(qwen3(), tmp_path / "functions", task="statistics", level="L1")
    modules = dump(qwen3(), tmp_path / "modules", task="statistics")
    result = trainfer.compare(functions, modules)
    assert (result.verdict, result.exit_code) == ("incomparable", 2)


def test_a_number_that_is_not_there_is_no_pass(tmp_path: Path):
    """msProbe: 222 `pass`."""
    damaged = edited(GOLDEN / "stat_L0_a", tmp_path / "damaged", without_maximum)
    assert trainfer.compare(GOLDEN / "stat_L0_a", damaged).exit_code != 0


def test_another_dtype_is_rounding_and_no_error(tmp_path: Path):
    """msProbe: 197 of 222 rows `error`, for the dtype alone."""
    wide, narrow = dump(qwen3(), tmp_path / "wide"), dump(qwen3().bfloat16(), tmp_path / "narrow")
    result = trainfer.compare(narrow, wide)
    statuses = [module.status.value for module in result.comparison.modules]
    assert statuses.count("diverged") == 0
    assert result.verdict == "rounding"


def test_statistics_against_values_is_compared(tmp_path: Path):
    """msProbe: a traceback."""
    numbers, values = dump(qwen3(), tmp_path / "a", task="statistics"), dump(qwen3(), tmp_path / "b")
    assert trainfer.compare(numbers, values).verdict == "equal"
    assert trainfer.compare(GOLDEN / "stat_L0_b", GOLDEN / "tensor_L0_a").exit_code == 1


def test_another_attention_kernel_is_rounding(tmp_path: Path):
    """msProbe passes it too; a negative control."""
    result = trainfer.compare(dump(qwen3(), tmp_path / "a"), dump(qwen3("sdpa"), tmp_path / "b"))
    assert result.verdict == "rounding"


def test_nan_on_both_sides_is_no_pass(tmp_path: Path):
    """msProbe: `pass`, by design."""
    model = qwen3()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    result = trainfer.compare(dump(model, tmp_path / "a"), dump(model, tmp_path / "b"))
    assert (result.verdict, result.first_divergence.module) == ("diverged", "model.layers.0.mlp.down_proj")


def test_a_checksum_sees_equal_halves(tmp_path: Path):
    """msProbe's xor gives 0x0 for position ids 0..7 and for rotary cos and sin alike."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"task": "statistics", "level": "L0", "dump_path": str(tmp_path / "d"), "statistics": {"summary_mode": "md5"}})
    )  # fmt: skip
    debugger = PrecisionDebugger(str(path))
    model = nn.Sequential(nn.Identity())
    debugger.start(model)
    for halves in ([1.0, 1.0], [2.0, 2.0]):
        model(torch.tensor(halves))
    PrecisionDebugger.close()
    data = json.loads((tmp_path / "d/step0/rank0/dump.json").read_text())["data"]
    first, second = (data[f"Module.0.Identity.forward.{call}"]["output"][0]["md5"] for call in (0, 1))
    assert first != second


@pytest.mark.parametrize("count", [1, 20])
def test_missing_files_are_no_pass(tmp_path: Path, count: int):
    """msProbe: the rows count as `pass`, exit 0."""
    folder = shutil.copytree(GOLDEN / "tensor_L0_a", tmp_path / "damaged")
    for path in sorted((folder / "step0/rank0/dump_tensor_data").glob("*output*"))[:count]:
        path.unlink()
    result = trainfer.compare(GOLDEN / "tensor_L0_a", folder)
    assert (result.verdict, result.exit_code) == ("incomparable", 2)
