"""Attention on a CUDA device whose every row has the same bits in prefill, training and decode (Triton).

Takes packed rows ``[T, H, K]`` with a list of query tiles, or one query row a slot against a paged cache; gives
``[T, H, K]``. Why the bits agree: a row meets its keys from position 0 upward in blocks of ``KEY_BLOCK``, every block
goes through one body (``_fold``) with a fixed order of reduction and explicit fused multiply-adds, and a block that is
masked as a whole changes nothing. What else shares the tile, or how many rows there are, never matters.

The backward of the packed form is the library's flash attention backward, fed with this forward's output and
logsumexp; it need not be row-invariant, since only forwards are compared.

Leaves out: windows, soft-caps, dropout (``exact.gpu_plan`` sends those to ``exact.attention``).

Axes: T rows, B slots, H query heads, G key/value heads, K head size, L key length.
"""

from typing import Any, cast

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

jit = cast(Any, triton.jit)

KEY_BLOCK = 64
"""Keys that one step of the running softmax takes; a page of the cache holds a multiple of it."""
QUERY_BLOCK = 64
"""Query rows of a tile in the packed form."""
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
HEAD_SIZES = (16, 32, 64, 128, 256)


@jit
def _fold(acc, total, peak, query, key_KN, value_NK, scale, seen_MN, MASKED: tl.constexpr):
    """One block of keys into the running softmax; scores are in units of log 2."""
    scores = tl.dot(query, key_KN)
    if MASKED:
        scores = tl.where(seen_MN, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    shrink = tl.math.exp2(peak - new_peak)
    weights = tl.math.exp2(tl.fma(scores, scale, -new_peak[:, None]))
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    acc = tl.dot(weights.to(value_NK.dtype), value_NK, acc * shrink[:, None])
    return acc, total, new_peak


@jit
def _packed_kernel(
    query, key, value, out, lse, tiles, scale, query_row, query_head, key_row, key_head, value_row, value_head,
    num_rows, heads_per_group,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    group = head // heads_per_group
    query_offset = tl.load(tiles + tile * 4)
    key_start = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    first = tl.load(tiles + tile * 4 + 2)
    length = tl.load(tiles + tile * 4 + 3)
    position_M = first + tl.arange(0, BM)
    column_N = tl.arange(0, BN)
    size_K = tl.arange(0, K)
    is_row = position_M < length
    row_M = (query_offset + position_M).to(tl.int64)
    q = tl.load(
        query + row_M[:, None] * query_row + head * query_head + size_K[None, :],
        mask=is_row[:, None],
        other=0.0,
    )
    keys = key + (key_start + column_N)[None, :] * key_row + group * key_head + size_K[:, None]
    values = value + (key_start + column_N)[:, None] * value_row + group * value_head + size_K[None, :]
    acc = tl.zeros((BM, K), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    full = (first + 1) // BN * BN
    for n in tl.range(0, full, BN):
        k = tl.load(keys + n * key_row)
        v = tl.load(values + n * value_row)
        acc, total, peak = _fold(acc, total, peak, q, k, v, scale, is_row[:, None], MASKED=False)
    for n in tl.range(full, tl.minimum(first + BM, length), BN):
        is_key = n + column_N < length
        k = tl.load(keys + n * key_row, mask=is_key[None, :], other=0.0)
        v = tl.load(values + n * value_row, mask=is_key[:, None], other=0.0)
        seen = (n + column_N)[None, :] <= position_M[:, None]
        acc, total, peak = _fold(acc, total, peak, q, k, v, scale, seen, MASKED=True)
    result = acc / total[:, None]
    heads = tl.num_programs(1)
    tl.store(
        out + (row_M[:, None] * heads + head) * K + size_K[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None],
    )
    tl.store(
        lse + head.to(tl.int64) * num_rows + row_M, (peak + tl.log2(total)) * 0.6931471805599453, mask=is_row
    )


@jit
def _decode_kernel(
    query, keys, values, table, positions, out, scale, table_row, heads_per_group,
    K: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    length = tl.load(positions + slot).to(tl.int32) + 1
    member_M = tl.arange(0, BM)
    column_N = tl.arange(0, BN)
    size_K = tl.arange(0, K)
    is_row = member_M < heads_per_group
    head_M = (slot * groups + group) * heads_per_group + member_M
    q = tl.load(query + head_M[:, None] * K + size_K[None, :], mask=is_row[:, None], other=0.0)
    row_size = groups * K
    key_inner = column_N[None, :] * row_size + group * K + size_K[:, None]
    value_inner = column_N[:, None] * row_size + group * K + size_K[None, :]
    acc = tl.zeros((BM, K), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    pages = table + slot * table_row
    full = length // BN * BN
    for n in tl.range(0, full, BN):
        start = (tl.load(pages + n // PAGE).to(tl.int64) * PAGE + n % PAGE) * row_size
        k = tl.load(keys + start + key_inner)
        v = tl.load(values + start + value_inner)
        acc, total, peak = _fold(acc, total, peak, q, k, v, scale, is_row[:, None], MASKED=False)
    for n in tl.range(full, length, BN):
        start = (tl.load(pages + n // PAGE).to(tl.int64) * PAGE + n % PAGE) * row_size
        k = tl.load(keys + start + key_inner)
        v = tl.load(values + start + value_inner)
        seen = ((n + column_N)[None, :] < length) & (member_M[:, None] >= 0)
        acc, total, peak = _fold(acc, total, peak, q, k, v, scale, seen, MASKED=True)
    result = acc / total[:, None]
    tl.store(
        out + head_M[:, None] * K + size_K[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None]
    )


def supports(dtype: torch.dtype, head_size: int) -> bool:
    """Whether the kernels take rows of this kind."""
    return dtype in (torch.bfloat16, torch.float16) and head_size in HEAD_SIZES


def packed_forward(
    query_THK: Tensor, key_LGK: Tensor, value_LGK: Tensor, tiles: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of tiles of query rows against the packed keys of their sequences.

    Args:
        query_THK: Innermost axis dense.
        key_LGK: Rows of all keys; innermost axis dense.
        value_LGK: Likewise.
        tiles: ``[tiles, 4]`` int32: (row of the sequence's position 0 among the queries, row of its key 0, first
            position of the tile, sequence length). The first may be negative where the first rows live elsewhere.
        scale: Factor of the scores.

    Returns:
        ``[T, H, K]`` and the natural logsumexp of the scaled scores, ``[H, T]`` float32. Rows of no tile are garbage.
    """
    rows, heads, size = query_THK.shape
    assert query_THK.stride(2) == key_LGK.stride(2) == value_LGK.stride(2) == 1
    out = torch.empty(rows, heads, size, dtype=query_THK.dtype, device=query_THK.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=query_THK.device)
    _packed_kernel[(tiles.shape[0], heads)](
        query_THK, key_LGK, value_LGK, out, lse, tiles, scale * LOG2_E,
        query_THK.stride(0), query_THK.stride(1), key_LGK.stride(0), key_LGK.stride(1),
        value_LGK.stride(0), value_LGK.stride(1), rows, heads // key_LGK.shape[1],
        K=size, BM=QUERY_BLOCK, BN=KEY_BLOCK, num_warps=4, num_stages=2 if size > 128 else 3,
    )  # fmt: skip
    return out, lse


def decode_forward(
    query_BHK: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions_B: Tensor,
    scale: float,
    *,
    page: int,
) -> Tensor:
    """One query row a slot against its cached keys, those of positions 0 to its own.

    Args:
        query_BHK: Dense.
        keys: Cache rows ``[pages * page, G, K]``, dense and finite.
        values: Likewise.
        table: ``[B, pages of a slot]`` int32, the page of each ``page`` positions.
        positions_B: Position of each row.
        scale: Factor of the scores.
        page: Tokens of a page, a multiple of ``KEY_BLOCK``.

    Returns:
        ``[B, H, K]``.
    """
    slots, heads, size = query_BHK.shape
    groups = keys.shape[1]
    assert page % KEY_BLOCK == 0
    assert heads // groups <= QUERY_BLOCK
    assert query_BHK.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    out = torch.empty_like(query_BHK)
    _decode_kernel[(slots, groups)](
        query_BHK, keys, values, table, positions_B, out, scale * LOG2_E, table.stride(0), heads // groups,
        K=size, PAGE=page, BM=QUERY_BLOCK, BN=KEY_BLOCK, num_warps=4, num_stages=2 if size > 128 else 3,
    )  # fmt: skip
    return out


class _PackedAttention(torch.autograd.Function):
    """``packed_forward`` with the library's flash backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THK: Tensor,
        key_LGK: Tensor,
        value_LGK: Tensor,
        tiles: Tensor,
        cumulative: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        scale: float,
    ) -> Tensor:
        out, lse = packed_forward(query_THK, key_LGK, value_LGK, tiles, scale)
        ctx.save_for_backward(query_THK, key_LGK, value_LGK, out, lse, *cumulative)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse, cumulative_q, cumulative_k = ctx.saved_tensors
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        gradients = torch.ops.aten._flash_attention_backward(
            grad_outputs[0].contiguous(), query, key, value, out, lse, cumulative_q, cumulative_k, *ctx.longest, 0.0,
            True, unused, unused, scale=ctx.scale,  # noqa: FBT003 - the operator takes it by place
        )  # fmt: skip
        return (*gradients, None, None, None, None)


def packed_attention(
    query_THK: Tensor,
    key_LGK: Tensor,
    value_LGK: Tensor,
    tiles: Tensor,
    cumulative: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
) -> Tensor:
    """``packed_forward`` with autograd: the library's flash backward.

    Args:
        query_THK: See ``packed_forward``.
        key_LGK: Likewise.
        value_LGK: Likewise.
        tiles: Likewise.
        cumulative: Ends of the runs among queries and among keys, ``[runs + 1]`` int32, from 0.
        longest: Rows and keys of the longest run.
        scale: Factor of the scores.
    """
    return _PackedAttention.apply(query_THK, key_LGK, value_LGK, tiles, cumulative, longest, scale)
