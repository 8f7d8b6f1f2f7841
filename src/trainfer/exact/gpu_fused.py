"""The row-wise work between projections and attention in a decode step, in one kernel (Triton).

``rope_and_store``: norms of query and key heads (where the model has them), rotary positions, and the writing of keys
and values into the paged cache. It rounds to the rows' dtype wherever the eager operators do. Floating-point fusion is off: a fused multiply-add would skip
a rounding in between.

Axes: B slots, H query heads, G key/value heads, K head size.
"""

from typing import Any, cast

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from trainfer.exact.gpu_norm import normed

jit = cast(Any, triton.jit)

HEADS = 16
"""Heads of a program: with a head's width the tile of ``gpu_norm.tile_of``, so that sums run in the same order."""


@jit
def _turned(base, stride, head_R, is_head_R, weight, cosine, sine, eps, K: tl.constexpr, NORM: tl.constexpr):
    """Heads ``[R, K]``, normed if asked for, at their rotary position."""
    size = tl.arange(0, K)
    other = (size + K // 2) % K
    mask = is_head_R[:, None] & (size >= 0)[None, :]
    value = tl.load(base + head_R[:, None] * stride + size[None, :], mask=mask, other=0.0)
    partner = tl.load(base + head_R[:, None] * stride + other[None, :], mask=mask, other=0.0)
    if NORM:
        factor = tl.load(weight + size)[None, :]
        turned_factor = tl.load(weight + other)[None, :]
        value, inverse = normed(value, factor, eps, K)
        unit = (partner.to(tl.float32) * inverse[:, None]).to(value.dtype)
        partner = (unit.to(tl.float32) * turned_factor.to(tl.float32)).to(value.dtype)
    sign = tl.where(size < K // 2, -1.0, 1.0)[None, :]
    cos = tl.load(cosine + size)[None, :].to(tl.float32)
    sin = tl.load(sine + size)[None, :].to(tl.float32)
    straight = (value.to(tl.float32) * cos).to(value.dtype)
    crossed = (partner.to(tl.float32) * sign * sin).to(value.dtype)
    return (straight.to(tl.float32) + crossed.to(tl.float32)).to(value.dtype)


@jit
def _rope_kernel(
    projected, positions, cosines, sines, query_weight, key_weight, table, query_out, keys, values, eps, table_row,
    query_heads, key_heads, query_chunks, key_chunks,
    K: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    chunk = tl.program_id(1)
    position = tl.load(positions + slot)
    size = tl.arange(0, K)
    base = projected + slot.to(tl.int64) * (query_heads + 2 * key_heads) * K
    cosine = cosines + position * K
    sine = sines + position * K
    page = tl.load(table + slot * table_row + position // PAGE).to(tl.int64)
    cache_row = (page * PAGE + position % PAGE) * key_heads * K
    if chunk < query_chunks:
        head = chunk * R + tl.arange(0, R)
        is_head = head < query_heads
        turned = _turned(base, K, head, is_head, query_weight, cosine, sine, eps, K, NORM)
        at = (slot * query_heads + head)[:, None] * K + size[None, :]
        tl.store(query_out + at, turned, mask=is_head[:, None] & (size >= 0)[None, :])
    elif chunk < query_chunks + key_chunks:
        head = (chunk - query_chunks) * R + tl.arange(0, R)
        is_head = head < key_heads
        turned = _turned(base + query_heads * K, K, head, is_head, key_weight, cosine, sine, eps, K, NORM)
        at = cache_row + head[:, None] * K + size[None, :]
        tl.store(keys + at, turned, mask=is_head[:, None] & (size >= 0)[None, :])
    else:
        head = (chunk - query_chunks - key_chunks) * R + tl.arange(0, R)
        mask = (head < key_heads)[:, None] & (size >= 0)[None, :]
        inner = head[:, None] * K + size[None, :]
        value = tl.load(base + (query_heads + key_heads) * K + inner, mask=mask, other=0.0)
        tl.store(values + cache_row + inner, value, mask=mask)


def rope_and_store(
    projected: Tensor,
    positions_B: Tensor,
    rotary: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    table: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    query_heads: int,
    page: int,
) -> Tensor:
    """Turn queries and keys to their positions and put keys and values into the cache.

    Args:
        projected: ``[B, (H + 2 G) * K]``: queries, keys, values.
        positions_B: int64.
        rotary: Cosines and sines ``[positions, K]`` in the rows' dtype.
        weights: Of the norms of query and key heads, ``[K]`` each.
        eps: Of these norms.
        table: ``[B, pages of a slot]`` int32.
        cache: Keys and values ``[pages * page, G, K]``; written to.
        query_heads: H.
        page: Tokens of a page.

    Returns:
        Queries ``[B, H, K]``.
    """
    keys, values = cache
    key_heads, size = keys.shape[1:]
    slots = projected.shape[0]
    query = torch.empty(slots, query_heads, size, dtype=projected.dtype, device=projected.device)
    query_chunks, key_chunks = triton.cdiv(query_heads, HEADS), triton.cdiv(key_heads, HEADS)
    query_weight, key_weight = (projected, projected) if weights is None else weights
    _rope_kernel[(slots, query_chunks + 2 * key_chunks)](
        projected, positions_B, *rotary, query_weight, key_weight, table, query, keys, values, eps, table.stride(0),
        query_heads, key_heads, query_chunks, key_chunks,
        K=size, PAGE=page, R=HEADS, NORM=weights is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return query
