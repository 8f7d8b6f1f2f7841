"""Row-wise kernels of a training or prefill forward, with gradients, bit for bit what eager operators compute (Triton).

``rotate``: rotary positions, ``q * cos + rotate_half(q) * sin`` of query and key in one kernel. ``silu_product``:
``silu(gate) * up``. Each rounds to the rows' dtype wherever the eager operators do, so other forwards may go on calling
those. Floating-point fusion is off: a fused multiply-add would skip a rounding in between.

Axes: T rows, H query heads, G key/value heads, K head size, F width of the MLP.
"""

from typing import Any, cast

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

jit = cast(Any, triton.jit)

_HEADS = 16
_BLOCK = 1024


@jit
def _rotate_kernel(
    query, key, query_out, key_out, cosines, sines, query_row, key_row, query_heads, key_heads, query_chunks,
    K: tl.constexpr, R: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    size = tl.arange(0, K)
    other = (size + K // 2) % K
    is_query = chunk < query_chunks
    heads = tl.where(is_query, query_heads, key_heads)
    head = tl.where(is_query, chunk, chunk - query_chunks) * R + tl.arange(0, R)
    mask = (head < heads)[:, None] & (size >= 0)[None, :]
    source = tl.where(is_query, query + row * query_row, key + row * key_row)
    target = tl.where(is_query, query_out + row * query_heads * K, key_out + row * key_heads * K)
    value = tl.load(source + head[:, None] * K + size[None, :], mask=mask, other=0.0)
    partner = tl.load(source + head[:, None] * K + other[None, :], mask=mask, other=0.0)
    cos = tl.load(cosines + row * K + size)[None, :].to(tl.float32)
    if BACK:
        sin = tl.load(sines + row * K + other)[None, :].to(tl.float32)
        sign = tl.where(size < K // 2, 1.0, -1.0)[None, :]
    else:
        sin = tl.load(sines + row * K + size)[None, :].to(tl.float32)
        sign = tl.where(size < K // 2, -1.0, 1.0)[None, :]
    straight = (value.to(tl.float32) * cos).to(value.dtype)
    crossed = (partner.to(tl.float32) * sign * sin).to(value.dtype)
    result = (straight.to(tl.float32) + crossed.to(tl.float32)).to(value.dtype)
    tl.store(target + head[:, None] * K + size[None, :], result, mask=mask)


def _rotated(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *, back: bool
) -> tuple[Tensor, Tensor]:
    rows, query_heads, size = query.shape
    key_heads = key.shape[1]
    query, key = (item if item.stride()[1:] == (size, 1) else item.contiguous() for item in (query, key))
    out = [
        torch.empty(rows, heads, size, dtype=query.dtype, device=query.device)
        for heads in (query_heads, key_heads)
    ]
    query_chunks = triton.cdiv(query_heads, _HEADS)
    _rotate_kernel[(rows, query_chunks + triton.cdiv(key_heads, _HEADS))](
        query, key, *out, cosines, sines, query.stride(0), key.stride(0), query_heads, key_heads, query_chunks,
        K=size, R=_HEADS, BACK=back, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out[0], out[1]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosines, sines)
        return _rotated(query, key, cosines, sines, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        return *_rotated(*grad_outputs, *ctx.saved_tensors, back=True), None, None


def rotate(query_THK: Tensor, key_TGK: Tensor, cosines_TK: Tensor, sines_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key at their rotary positions, dense.

    Args:
        query_THK: A power of two wide, as are all.
        key_TGK: As many rows.
        cosines_TK: Dense, in the rows' dtype.
        sines_TK: Likewise.
    """
    return _Rotate.apply(query_THK, key_TGK, cosines_TK.contiguous(), sines_TK.contiguous())


@jit
def _active(gate):
    """``silu`` in float32 as the eager operator computes it, and the logistic function."""
    wide = gate.to(tl.float32)
    divisor = 1.0 + libdevice.exp(-wide)
    return tl.div_rn(wide, divisor), tl.div_rn(1.0, divisor)


@jit
def _silu_kernel(gate_rows, up_rows, out, row_stride, out_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_rows + row * row_stride + column, mask=mask, other=0.0)
    up = tl.load(up_rows + row * row_stride + column, mask=mask, other=0.0)
    active, _ = _active(gate)
    result = active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * out_stride + column, result.to(gate.dtype), mask=mask)


@jit
def _silu_backward_kernel(gradient, gate_rows, up_rows, gate_out, up_out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    grad = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_rows + at, mask=mask, other=0.0)
    up = tl.load(up_rows + at, mask=mask, other=0.0).to(tl.float32)
    active, logistic = _active(gate)
    rounded = active.to(gate.dtype).to(tl.float32)
    slope = logistic * (1.0 + gate.to(tl.float32) * (1.0 - logistic))
    tl.store(up_out + at, (grad * rounded).to(gate.dtype), mask=mask)
    tl.store(gate_out + at, (grad * up * slope).to(gate.dtype), mask=mask)


def silu_rows(gate_rows: Tensor, up_rows: Tensor, out: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[rows, F]`` into the first rows of ``out``; equal row strides, no gradient."""
    rows, width = gate_rows.shape
    assert gate_rows.stride() == up_rows.stride()
    assert gate_rows.stride(1) == out.stride(1) == 1
    _silu_kernel[(rows, triton.cdiv(width, _BLOCK))](
        gate_rows, up_rows, out, gate_rows.stride(0), out.stride(0), width,
        BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        width = gate.shape[-1]
        silu_rows(gate.view(-1, width), up.view(-1, width), out.view(-1, width))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        for_gate, for_up = torch.empty_like(gate), torch.empty_like(up)
        _silu_backward_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
            grad_outputs[0].contiguous(), gate, up, for_gate, for_up, gate.numel(), BLOCK=_BLOCK, num_warps=4
        )
        return for_gate, for_up


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, any shape, with autograd."""
    return _SiluProduct.apply(gate, up)
