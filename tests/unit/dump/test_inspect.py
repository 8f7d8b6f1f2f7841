"""``trainfer inspect`` says what is in a dump and what is damaged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trainfer
from trainfer.check.dump.reader import Dump
from trainfer.cli.main import main


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    with torch.no_grad(), trainfer.capture(model, tmp_path / "d", side="train") as cap:
        model(torch.tensor([[1, 2, 3]]))
        cap.record_logprobs(sequences=[[1, 2, 3]], prompt_lengths=[1], logprobs=[[-0.5, -0.25]])
    return tmp_path / "d"


def test_a_whole_dump_is_code_0_and_counted(dump: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(dump), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["ok"], answer["records"], answer["sequences"]) == (
        "trainfer.inspect/1",
        True,
        6,
        1,
    )
    assert answer["roles"] == {"input": 3, "output": 3}
    (only,) = answer["passes"]
    assert (only["pass_name"], only["calls"], only["records"], only["nbytes"]) == (
        "forward",
        1,
        6,
        3 * 8 + 2 * 3 * 4 * 4,
    )
    assert answer["weights"] == {"0": 3}
    assert main(["inspect", str(dump)]) == 0
    assert "complete · Sequential F32" in capsys.readouterr().out


def test_damage_is_code_1_and_named(dump: Path, capsys: pytest.CaptureFixture[str]):
    record = [t for t in Dump(dump).tensors(0) if t.module == "1"][-1]
    assert record.blob is not None
    shard = dump / "rank0" / record.blob.shard
    data = bytearray(shard.read_bytes())
    data[record.blob.offset] ^= 1
    shard.write_bytes(data)
    assert main(["inspect", str(dump), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["damaged_records"] == 2, "the last module's output is the root's too"
    assert "checksum" in answer["damaged"][0]
    assert main(["inspect", str(dump), "--quick"]) == 0
    shard.unlink()
    assert main(["inspect", str(dump), "--quick"]) == 1
    assert "6 damaged records (only sizes were looked at)" in capsys.readouterr().out


def test_no_dump_is_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds no dump" in capsys.readouterr().err


def test_inspecting_loads_no_torch(dump: Path):
    code = f"import sys; from trainfer.cli.main import main; main(['inspect', {str(dump)!r}]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
