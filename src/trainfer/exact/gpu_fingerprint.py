"""The sums of ``exact.fingerprint`` on a CUDA device in one reading (Triton).

Takes a tensor's bits as integers and the tables of weights; gives the two sums mod 2^64. A program takes one row of
the tables; sums are added atomically, whose order does not matter mod 2^64.

Axes: C columns of the tables, R rows.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

jit = cast(Any, triton.jit)

_BLOCK = 2048


@jit
def _kernel(
    bits, count, start, column_weights, row_weights, row_stride, out, C: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    first = tl.zeros((BLOCK,), tl.int64)
    second = tl.zeros((BLOCK,), tl.int64)
    for begin in tl.range(0, C, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        at = row.to(tl.int64) * C + column - start
        value = tl.load(bits + at, mask=(at >= 0) & (at < count), other=0).to(tl.int64)
        first += value * tl.load(column_weights + column)
        second += value * tl.load(column_weights + C + column)
    tl.atomic_add(out, tl.sum(first, 0) * tl.load(row_weights + row))
    tl.atomic_add(out + 1, tl.sum(second, 0) * tl.load(row_weights + row_stride + row))


def sums(bits: Tensor, column_weights: Tensor, row_weights: Tensor, start: int) -> Tensor:
    """Both sums, int64 ``[2]``.

    Args:
        bits: Flat integers of any width.
        column_weights: ``[2, C]`` int64.
        row_weights: ``[2, R]`` int64 from the first element's row on; its second axis dense.
        start: Column of the first element.
    """
    out = torch.zeros(2, dtype=torch.int64, device=bits.device)
    columns = column_weights.shape[1]
    rows = triton.cdiv(start + bits.numel(), columns)
    assert row_weights.shape[1] >= rows
    assert row_weights.stride(1) == 1
    _kernel[(rows,)](
        bits, bits.numel(), start, column_weights, row_weights, row_weights.stride(0), out,
        C=columns, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return out


@jit
def _many_kernel(
    addresses, counts, owners, rows, column_weights, row_weights, row_stride, out,
    WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner = tl.load(owners + tl.program_id(0))
    row = tl.load(rows + tl.program_id(0))
    count = tl.load(counts + owner)
    address = tl.load(addresses + owner)
    if WIDTH == 1:
        bits = address.to(tl.pointer_type(tl.int8))
    elif WIDTH == 2:
        bits = address.to(tl.pointer_type(tl.int16))
    elif WIDTH == 4:
        bits = address.to(tl.pointer_type(tl.int32))
    else:
        bits = address.to(tl.pointer_type(tl.int64))
    first = tl.zeros((BLOCK,), tl.int64)
    second = tl.zeros((BLOCK,), tl.int64)
    for begin in tl.range(0, C, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        at = row.to(tl.int64) * C + column
        value = tl.load(bits + at, mask=at < count, other=0).to(tl.int64)
        first += value * tl.load(column_weights + column)
        second += value * tl.load(column_weights + C + column)
    tl.atomic_add(out + owner * 2, tl.sum(first, 0) * tl.load(row_weights + row))
    tl.atomic_add(out + owner * 2 + 1, tl.sum(second, 0) * tl.load(row_weights + row_stride + row))


def many(bits: Sequence[Tensor], column_weights: Tensor, row_weights: Tensor) -> Tensor:
    """Both sums of each tensor, int64 ``[tensors, 2]``, in one launch per width of element.

    Args:
        bits: Flat, dense integers of any width, each from its first element on.
        column_weights: ``[2, C]`` int64.
        row_weights: ``[2, R]`` int64 from row 0 on.
    """
    device = column_weights.device
    columns = column_weights.shape[1]
    out = torch.zeros(len(bits), 2, dtype=torch.int64, device=device)
    addresses = torch.tensor([item.data_ptr() for item in bits], dtype=torch.int64).to(device)
    counts = numpy.array([item.numel() for item in bits], dtype=numpy.int64)
    counts_on_device = torch.from_numpy(counts).to(device)
    for width in sorted({item.element_size() for item in bits}):
        mine = numpy.array(
            [i for i, item in enumerate(bits) if item.element_size() == width], dtype=numpy.int32
        )
        num_rows = -(-counts[mine] // columns)
        owners = numpy.repeat(mine, num_rows)
        starts = numpy.repeat(numpy.cumsum(num_rows) - num_rows, num_rows)
        rows = (numpy.arange(len(owners)) - starts).astype(numpy.int32)
        if len(owners):
            _many_kernel[(len(owners),)](
                addresses, counts_on_device, torch.from_numpy(owners).to(device), torch.from_numpy(rows).to(device),
                column_weights, row_weights, row_weights.stride(0), out,
                WIDTH=width, C=columns, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
    return out
