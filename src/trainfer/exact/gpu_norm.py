"""RMS norm on a CUDA device, one kernel instead of six, the same for trainer and engine (Triton).

Takes rows ``[..., D]``, optionally with a residual to add first; gives the normed rows in the same dtype, rounded
where Transformers rounds (after the norm, before the weight: ``weight * (x * rsqrt(mean(x^2) + eps)).to(dtype)``;
Zhang and Sennrich 2019, arXiv 1910.07467). Only the order of summation over D may differ from Transformers' own
kernels; it is fixed here per D, so a row has the same bits in any batch.

Axes: R rows, D width.
"""

from typing import Any, cast

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

jit = cast(Any, triton.jit)

WIDEST = 16384
"""One program holds a row."""


@jit
def normed(value, weight, eps, D: tl.constexpr):
    """Rows ``[R, BLOCK]`` (zeros beyond D) and weight ``[1, BLOCK]`` -> normed rows, in their dtype, and 1/rms."""
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    unit = (wide * inverse[:, None]).to(value.dtype)
    return (unit.to(tl.float32) * weight.to(tl.float32)).to(value.dtype), inverse


@jit
def _forward_kernel(
    rows, added, weight, out, total, inverses, num_rows, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    value = tl.load(rows + at, mask=mask, other=0.0)
    if ADD:
        other = tl.load(added + at, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + at, value, mask=mask)
    factor = tl.load(weight + column[None, :], mask=(column < D)[None, :], other=0.0)
    result, inverse = normed(value, factor, eps, D)
    tl.store(out + at, result, mask=mask)
    if KEEP:
        tl.store(inverses + row, inverse, mask=row < num_rows)


@jit
def _backward_kernel(
    gradient, rows, weight, inverses, out, weight_sums, num_rows,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column[None, :], mask=(column < D)[None, :], other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, num_rows, step):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < num_rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        value = tl.load(rows + at, mask=mask, other=0.0)
        grad = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row, mask=row < num_rows, other=0.0)
        unit = value.to(tl.float32) * inverse[:, None]
        sums += tl.sum(grad * unit.to(value.dtype).to(tl.float32), 0)
        inner = grad * factor
        mean = tl.sum(inner * unit, 1) / D
        result = (inner - unit * mean[:, None]) * inverse[:, None]
        tl.store(out + at, result.to(value.dtype), mask=mask)
    tl.store(weight_sums + tl.program_id(0) * D + column, sums, mask=column < D)


def tile_of(width: int) -> tuple[int, int]:
    """Padded width and rows of a program; they decide the order of summation, so they depend on the width alone."""
    block = triton.next_power_of_2(width)
    return block, 1 if block > 256 else 16


def _launch(rows: Tensor, added: Tensor | None, weight: Tensor, eps: float, *, keep: bool) -> list[Tensor]:
    assert rows.is_contiguous()
    width = rows.shape[-1]
    count = rows.numel() // width
    block, per_program = tile_of(width)
    out = torch.empty_like(rows)
    total = rows if added is None else torch.empty_like(rows)
    inverses = torch.empty(count, dtype=torch.float32, device=rows.device) if keep else rows
    _forward_kernel[(triton.cdiv(count, per_program),)](
        rows, rows if added is None else added, weight, out, total, inverses, count, eps,
        D=width, BLOCK=block, ROWS=per_program, ADD=added is not None, KEEP=keep, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return [out, total, inverses]


def add_norm(rows: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``rows + added`` normed, and ``rows + added`` itself; no gradient."""
    out, total, _ = _launch(rows, added, weight, eps, keep=False)
    return out, total


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = rows.contiguous()
        out, _, inverses = _launch(rows, None, weight, eps, keep=True)
        ctx.save_for_backward(rows, weight, inverses)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weight, inverses = ctx.saved_tensors
        gradient = grad_outputs[0].contiguous()
        width = rows.shape[-1]
        count = rows.numel() // width
        block, per_program = tile_of(width)
        programs = min(triton.cdiv(count, per_program), 1056)
        out = torch.empty_like(rows)
        sums = torch.empty(programs, width, dtype=torch.float32, device=rows.device)
        _backward_kernel[(programs,)](
            gradient, rows, weight, inverses, out, sums, count,
            D=width, BLOCK=block, ROWS=per_program, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out, sums.sum(0).to(weight.dtype), None


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normed rows ``[..., D]``, with autograd."""
    if torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        return _Norm.apply(rows, weight, eps)
    return _launch(rows.contiguous(), None, weight, eps, keep=False)[0]
