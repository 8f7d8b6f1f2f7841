"""Capture on a CUDA device: nothing changes, and what is written is what was computed."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

pytest.importorskip("msgspec")

import trainfer
from trainfer.check.dump.reader import Dump
from trainfer.check.dump.records import Role
from trainfer.check.dump.tensors import load_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model_and_ids(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").cuda()
    return model, torch.randint(3, 500, (4, 64), device="cuda")


def loss_and_gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    output = model(ids, labels=ids)
    output.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return output.loss.detach().clone(), output.logits.detach().clone(), gradients


@pytest.mark.parametrize("task", ["tensor", "statistics", "sketch"])
@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capture_changes_no_bit_and_misses_nothing(tmp_path: Path, dtype: torch.dtype, level: str, task: str):
    model, ids = model_and_ids(dtype)
    plain = loss_and_gradients(model, ids)
    random_state = torch.cuda.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trainfer.capture(model, tmp_path / "dump", side="train", level=level, task=task, backward=True):
            watched = loss_and_gradients(model, ids)
    assert torch.equal(watched[0], plain[0])
    assert torch.equal(watched[1], plain[1])
    assert all(torch.equal(a, b) for a, b in zip(watched[2], plain[2], strict=True))
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert Dump(tmp_path / "dump").complete


def test_what_is_written_is_what_was_computed(tmp_path: Path):
    model, ids = model_and_ids(torch.bfloat16)
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _m, _i, out, name=name: seen.update({name: out.detach().clone()})
            )
    with trainfer.capture(model, tmp_path / "dump", side="train"), torch.no_grad():
        logits = model(ids).logits
        logits.zero_()  # written over at once: the copy must have been ordered before
    dump = Dump(tmp_path / "dump")
    outputs = [t for t in dump.tensors(0) if t.role is Role.OUTPUT and t.module in seen]
    assert {record.module for record in outputs} == set(seen)
    for record in outputs:
        assert torch.equal(load_tensor(dump, 0, record), seen[record.module].cpu()), record.module


def test_statistics_of_the_device_are_those_of_the_host(tmp_path: Path):
    model, ids = model_and_ids(torch.float32)
    with trainfer.capture(model, tmp_path / "dump", side="train", task="statistics"), torch.no_grad():
        logits = model(ids).logits.double()
    dump = Dump(tmp_path / "dump")
    record = next(t for t in dump.tensors(0) if t.role is Role.OUTPUT and t.module == "lm_head")
    assert record.statistics is not None
    assert record.statistics.count == logits.numel()
    assert record.statistics.min == logits.min().item()
    assert record.statistics.max == logits.max().item()
    assert record.statistics.mean == pytest.approx(logits.mean().item(), rel=1e-5)
    assert record.statistics.nan == 0
