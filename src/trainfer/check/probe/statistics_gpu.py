"""The numbers of ``statistics.py`` on a CUDA device, in two kernels a tensor.

Takes a tensor; gives float64 ``[7 + quantiles]``: nan, inf, zeros, min, max, sum, sum of squares, quantiles of an evenly
strided sample. The first kernel reads the tensor once and leaves one row of sums for each of its programs; the second
adds these in order, so that the numbers are the same in every run, and sorts the sample.
"""
# pyright: standard
# (triton has no types)

import functools
from typing import Any, cast

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from trainfer.check.dump.records import QUANTILES
from trainfer.check.probe.statistics import SAMPLE

jit = cast(Any, triton.jit)

PROGRAMS = 1024
"""At most; several for each multiprocessor, so that enough reads are under way."""
_BLOCK = 2048
_NUMBERS = 7
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def can_reduce(tensor: Tensor) -> bool:
    """Whether the kernels read this dtype."""
    return tensor.dtype in _DTYPES and tensor.numel() > 0


def numbers_of(tensor: Tensor) -> Tensor:
    """float64 ``[7 + quantiles]`` on the tensor's device."""
    flat = tensor.reshape(-1)
    count = flat.numel()
    programs = min(PROGRAMS, triton.cdiv(count, _BLOCK))
    partial = torch.empty((programs, _NUMBERS), dtype=torch.float64, device=tensor.device)
    numbers = torch.empty(_NUMBERS + len(QUANTILES), dtype=torch.float64, device=tensor.device)
    stride = -(-count // SAMPLE)
    exact = tl.float64 if flat.dtype == torch.float64 else tl.float32
    _partial_kernel[(programs,)](flat, partial, count, BLOCK=_BLOCK, EXACT=exact, num_warps=8)
    _final_kernel[(1,)](
        flat, partial, _probabilities(tensor.device), numbers, programs, stride, -(-count // stride),
        PROGRAMS=PROGRAMS, SAMPLE=SAMPLE, PROBABILITIES=len(QUANTILES), num_warps=4,
    )  # fmt: skip
    return numbers


@functools.cache
def _probabilities(device: torch.device) -> Tensor:
    return torch.tensor(QUANTILES, dtype=torch.float64, device=device)


@jit
def _partial_kernel(values_ptr, partial_ptr, count, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """Row p: what the blocks p, p + programs, ... add up to; lanes in EXACT, squares and rows in float64."""
    program, step = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    nan = tl.zeros([BLOCK], tl.int32)
    inf = tl.zeros([BLOCK], tl.int32)
    zeros = tl.zeros([BLOCK], tl.int32)
    low = tl.full([BLOCK], float("inf"), EXACT)
    high = tl.full([BLOCK], float("-inf"), EXACT)
    total = tl.zeros([BLOCK], EXACT)
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(program * BLOCK, count, step):
        inside = start + lanes < count
        value = tl.load(values_ptr + start + lanes, mask=inside, other=1.0).to(EXACT)
        is_nan = value != value
        is_inf = tl.abs(value) == float("inf")
        finite = inside & ~is_nan & ~is_inf
        nan += (inside & is_nan).to(tl.int32)
        inf += (inside & is_inf).to(tl.int32)
        zeros += (inside & (value == 0.0)).to(tl.int32)
        low = tl.minimum(low, tl.where(finite, value, float("inf")))
        high = tl.maximum(high, tl.where(finite, value, float("-inf")))
        kept = tl.where(finite, value, 0.0)
        total += kept
        wide = kept.to(tl.float64)
        squares += wide * wide
    row = partial_ptr + program * 7
    tl.store(row, tl.sum(nan, 0).to(tl.float64))
    tl.store(row + 1, tl.sum(inf, 0).to(tl.float64))
    tl.store(row + 2, tl.sum(zeros, 0).to(tl.float64))
    tl.store(row + 3, tl.min(low, 0).to(tl.float64))
    tl.store(row + 4, tl.max(high, 0).to(tl.float64))
    tl.store(row + 5, tl.sum(total.to(tl.float64), 0))
    tl.store(row + 6, tl.sum(squares, 0))


@jit
def _final_kernel(
    values_ptr, partial_ptr, probabilities_ptr, numbers_ptr, programs, stride, sampled,
    PROGRAMS: tl.constexpr, SAMPLE: tl.constexpr, PROBABILITIES: tl.constexpr,
):  # fmt: skip
    """Adds the rows up, and takes the lower empirical quantiles of the finite part of the sample."""
    rows = tl.arange(0, PROGRAMS)
    there = rows < programs
    for column in tl.static_range(7):
        other = float("inf") if column == 3 else (float("-inf") if column == 4 else 0.0)
        part = tl.load(partial_ptr + rows * 7 + column, mask=there, other=other)
        if column == 3:
            tl.store(numbers_ptr + column, tl.min(part, 0))
        elif column == 4:
            tl.store(numbers_ptr + column, tl.max(part, 0))
        else:
            tl.store(numbers_ptr + column, tl.sum(part, 0))
    places = tl.arange(0, SAMPLE)
    value = tl.load(values_ptr + places.to(tl.int64) * stride, mask=places < sampled, other=float("inf"))
    value = value.to(tl.float64)
    usable = (places < sampled) & (value == value) & (tl.abs(value) != float("inf"))
    ordered = tl.sort(tl.where(usable, value, float("inf")))
    last = tl.maximum(tl.sum(usable.to(tl.int32), 0) - 1, 0).to(tl.float64)
    for index in tl.static_range(PROBABILITIES):
        place = (tl.load(probabilities_ptr + index) * last).to(tl.int32)
        tl.store(numbers_ptr + 7 + index, tl.max(tl.where(places == place, ordered, float("-inf")), 0))
