"""Tensors of every stride, size and dtype are captured whole, at the level of functions too."""

import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import tiny
from torch import Tensor, nn

import trainfer
from trainfer.check.dump.reader import Dump
from trainfer.check.dump.records import Role
from trainfer.check.dump.tensors import DTYPES, flat_bytes, load_tensor


class Passing(nn.Module):
    """Gives back what its only child got."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value)


BASE = torch.arange(120, dtype=torch.int64)
STRIDES = {
    "column": BASE.view(30, 4)[:, 1],
    "every_other": BASE[::2],
    "one_of_a_stride": BASE[::512],
    "size_one_dimension": BASE.as_strided((3, 1), (1, 77)),
    "last_dimension_of_size_one": BASE.as_strided((1, 1), (5, 9)),
    "transposed": BASE.view(30, 4).t(),
    "permuted": BASE.view(2, 3, 4, 5).permute(0, 2, 1, 3),
    "expanded": BASE[:4].expand(3, 4),
    "expanded_from_one": BASE[7:8].expand(5),
    "zero_dim": BASE[3],
    "zero_dim_with_offset": BASE.view(30, 4)[3, 2],
    "empty": BASE[:0],
    "empty_rows": BASE.view(30, 4)[:, :0],
    "overlapping": BASE.as_strided((4, 4), (1, 1)),
}


def captured(folder: Path, value: Tensor, level: str, task: str = "tensor") -> Dump:
    model = Passing()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trainfer.capture(model, folder, side="train", level=level, task=task):
            model(value)
    return Dump(folder)


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("name", list(STRIDES))
def test_any_strides_round_trip_bit_for_bit(dump_folder: Path, name: str, level: str):
    dump = captured(dump_folder, STRIDES[name], level)
    record = next(t for t in dump.tensors(0) if t.role is Role.INPUT)
    assert torch.equal(load_tensor(dump, 0, record), STRIDES[name])
    assert dump.manifest.incomplete_reasons == ()


def of_dtype(dtype: torch.dtype) -> Tensor:
    """Eight elements, every other one of memory."""
    octets = torch.arange(16 * dtype.itemsize, dtype=torch.uint8) % 2
    return octets.view(dtype)[::2]


@pytest.mark.parametrize("task", ["tensor", "statistics"])
@pytest.mark.parametrize("name", list(DTYPES))
def test_any_dtype_is_captured(dump_folder: Path, name: str, task: str):
    value = of_dtype(DTYPES[name])
    dump = captured(dump_folder, value, "L0", task)
    record = next(t for t in dump.tensors(0) if t.role is Role.INPUT)
    assert (record.dtype, record.shape) == (name, (8,))
    assert dump.manifest.incomplete_reasons == ()
    if task == "tensor":
        assert torch.equal(flat_bytes(load_tensor(dump, 0, record)), flat_bytes(value))
    else:
        assert record.statistics is not None
        assert record.statistics.count == 8


def test_a_conjugated_view_is_captured_as_it_reads(dump_folder: Path):
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    dump = captured(dump_folder, value, "L0")
    record = next(t for t in dump.tensors(0) if t.role is Role.INPUT)
    assert torch.equal(load_tensor(dump, 0, record), torch.tensor([1 - 2j, 3 + 4j], dtype=torch.complex64))


@pytest.mark.parametrize("level", ["L1", "mix"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_functions_of_a_model_leave_no_gap(dump_folder: Path, name: str, level: str):
    model = tiny(name)
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trainfer.capture(model, dump_folder, side="train", level=level, backward=True):
            model(ids, labels=ids).loss.backward()
    assert Dump(dump_folder).manifest.incomplete_reasons == ()
