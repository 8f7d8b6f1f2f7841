"""msProbe's own command, in its own environment, reads what our PrecisionDebugger writes.

Where it is: the environment variable TRAINFER_MSPROBE (its ``msprobe`` command), or ``.venv-msprobe`` in the clone
(`make setup-msprobe`).
"""

import csv
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from trainfer import PrecisionDebugger

CLONE = Path(__file__).parents[3]
COMMAND = Path(os.environ.get("TRAINFER_MSPROBE") or CLONE / ".venv-msprobe/bin/msprobe")
pytestmark = [
    pytest.mark.msprobe,
    pytest.mark.skipif(not COMMAND.is_file(), reason=f"{COMMAND} is not there: make setup-msprobe"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(nn.functional.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def dump(folder: Path, task: str, level: str, *, disturbed: bool) -> Path:
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(2, 5, 8)
    if disturbed:
        with torch.no_grad():
            model.blocks[1].down.weight.mul_(3.0)
    debugger = PrecisionDebugger(task=task, level=level, dump_path=folder)
    debugger.start(model)
    model(x).square().sum().backward()
    debugger.stop()
    PrecisionDebugger.close()
    return folder / "step0"


def compared(target: Path, golden: Path, out: Path) -> list[dict[str, str]]:
    command = [str(COMMAND), "compare", "-tp", str(target), "-gp", str(golden), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ends successfully" in done.stdout + done.stderr
    (path,) = out.glob("*.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("task", "level"), [("tensor", "L0"), ("statistics", "mix")])
def test_msprobe_compares_two_of_our_dumps(tmp_path: Path, task: str, level: str):
    """Whole step directories, as it reads its own: every row matched, and the disturbed block is seen."""
    golden = dump(tmp_path / "golden", task, level, disturbed=False)
    target = dump(tmp_path / "target", task, level, disturbed=True)
    rows = compared(target, golden, tmp_path / "out")
    results = Counter(row["Result"] for row in rows)
    assert results["error"] > 0
    assert not [row for row in rows if "N/A" in (row["NPU Name"], row["Bench Name"])]
    seen = [row["NPU Name"] for row in rows if row["Result"] == "error"]
    assert all("blocks.0" not in name or "backward" in name for name in seen)
    if task == "tensor":
        weight = next(
            row
            for row in rows
            if row["NPU Name"] == "Module.blocks.1.down.Linear.forward.0.parameters.weight"
        )
        assert float(weight["MaxRelativeErr"]) == pytest.approx(2.0, rel=1e-5)
        scale = [row for row in rows if row["NPU Name"] == "Module.blocks.1.Block.forward.0.input.scale"]
        assert len(scale) == 1
    else:
        assert any(row["NPU Name"].startswith("Functional.silu.1.forward") for row in rows)


def test_equal_dumps_are_equal_to_msprobe(tmp_path: Path):
    golden = dump(tmp_path / "golden", "tensor", "L0", disturbed=False)
    target = dump(tmp_path / "target", "tensor", "L0", disturbed=False)
    rows = compared(target, golden, tmp_path / "out")
    assert {row["Result"] for row in rows} == {"pass"}
    assert {float(row["MaxAbsErr"]) for row in rows if row["NPU Dtype"] == "torch.float32"} == {0.0}
