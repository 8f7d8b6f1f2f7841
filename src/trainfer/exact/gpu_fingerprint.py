"""The sums of ``exact.fingerprint`` on a CUDA device in one reading (Triton).

Takes a tensor's bits as integers and the tables of weights; gives the two sums mod 2^64. A program takes one row of
the tables; sums are added atomically, whose order does not matter mod 2^64.

Axes: C columns of the tables, R rows.
"""

from typing import Any, cast

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
