"""Differences of two row matrices: sums over elements, and one error per row.

Takes rows of any dtype, [n, F] on either side; gives ``Metrics`` and float32 errors [n]. Bitwise equal
chunks cost one pass over the bytes; others about twenty passes over a chunk that stays in cache.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainfer.check.compare.records import Metrics

CHUNK = 1 << 16
"""Elements compared at a time."""
_WIDE = frozenset({torch.float64, torch.int64, torch.int32, torch.uint32, torch.uint64, torch.complex64})
_ULP_VIEWS = {
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
}


def compare_rows(rollout: Tensor, train: Tensor) -> tuple[Metrics, NDArray[np.float32]]:
    """Compare row i with row i.

    A row's error is the larger of ‖d‖ / max(‖x‖, ‖y‖) and max |d| / max |x|, |y|; infinite where one side is
    NaN or infinite and the other is not the same.
    """
    assert rollout.shape == train.shape, "rows are paired and cut to equal widths before"
    num_rows, width = rollout.shape
    errors = np.zeros(num_rows, dtype=np.float32)
    total = Metrics()
    step = max(1, CHUNK // max(width, 1))
    if rollout.dtype == train.dtype and torch.equal(rollout, train):
        return _all_equal(rollout.numel()), errors
    for start in range(0, num_rows, step):
        x, y = rollout[start : start + step], train[start : start + step]
        if x.dtype == y.dtype and torch.equal(x, y):
            total = total.plus(_all_equal(x.numel()))
            continue
        block, row_errors = _compare_chunk(x, y)
        total = total.plus(block)
        errors[start : start + step] = row_errors.numpy()
    return total, errors


def _all_equal(elements: int) -> Metrics:
    return Metrics(
        elements=elements, equal=elements, within_thousandth=elements, within_five_thousandths=elements
    )


def _compare_chunk(x: Tensor, y: Tensor) -> tuple[Metrics, Tensor]:
    ulp = _ulp_max(x, y)
    wide = x.dtype in _WIDE or y.dtype in _WIDE
    x, y = (x.double(), y.double()) if wide else (x.float(), y.float())
    d = y - x
    magnitude = d.abs()
    sum_abs = float(magnitude.sum(dtype=torch.float64))
    if not math.isfinite(sum_abs):
        return _compare_with_odd_values(x, y, ulp)
    metrics, errors = _finite_chunk(x, y, d, magnitude)
    return _with(metrics, sum_abs=sum_abs, ulp=ulp), errors


def _finite_chunk(x: Tensor, y: Tensor, d: Tensor, magnitude: Tensor) -> tuple[Metrics, Tensor]:
    x_squared, y_squared, d_squared = _dots(x, x), _dots(y, y), _dots(d, d)
    if x.dtype == torch.float32 and not bool((x_squared + y_squared).isfinite().all()):
        return _finite_chunk(x.double(), y.double(), d.double(), magnitude.double())
    x_abs = x.abs()
    largest_d, largest_x, largest_y = magnitude.amax(1), x_abs.amax(1), y.abs().amax(1)
    norm = torch.maximum(x_squared, y_squared).sqrt_()
    tiny = torch.finfo(x.dtype).tiny
    errors = torch.maximum(
        d_squared.sqrt() / norm.clamp_(min=tiny),
        largest_d / torch.maximum(largest_x, largest_y).clamp_(min=tiny),
    )
    relative = (magnitude / x_abs).nan_to_num_(nan=0.0, posinf=0.0)
    metrics = Metrics(
        elements=x.numel(),
        equal=x.numel() - int(torch.count_nonzero(d)),
        max_abs=float(largest_d.max()),
        sum_relative=float(relative.sum(dtype=torch.float64)),
        max_relative=float(relative.max()),
        within_thousandth=int(torch.count_nonzero(relative < 1e-3)),
        within_five_thousandths=int(torch.count_nonzero(relative < 5e-3)),
        dot=float(_dots(x, y).sum(dtype=torch.float64)),
        sum_rollout_squared=float(x_squared.sum(dtype=torch.float64)),
        sum_train_squared=float(y_squared.sum(dtype=torch.float64)),
        sum_difference_squared=float(d_squared.sum(dtype=torch.float64)),
    )
    return metrics, errors.float()


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def _with(metrics: Metrics, *, sum_abs: float, ulp: int) -> Metrics:
    return metrics.plus(Metrics(sum_abs=sum_abs, ulp_max=ulp))


def _compare_with_odd_values(x: Tensor, y: Tensor, ulp: int) -> tuple[Metrics, Tensor]:
    """Some element is NaN or infinite: it is counted, and left out of every sum."""
    x_odd, y_odd = ~x.isfinite(), ~y.isfinite()
    both_nan = x.isnan() & y.isnan()
    same = x == y
    bad = (x_odd | y_odd) & ~same
    out = x_odd | y_odd
    x_clean, y_clean = x.masked_fill(out, 0.0), y.masked_fill(out, 0.0)
    d = y_clean - x_clean
    magnitude = d.abs()
    metrics, errors = _finite_chunk(x_clean, y_clean, d, magnitude)
    metrics = _with(metrics, sum_abs=float(magnitude.sum(dtype=torch.float64)), ulp=ulp)
    metrics = metrics.plus(
        Metrics(
            equal=-int(torch.count_nonzero(bad)),
            within_thousandth=-int(torch.count_nonzero(bad)),
            within_five_thousandths=-int(torch.count_nonzero(bad)),
            nan_rollout=int(torch.count_nonzero(x_odd & ~both_nan & ~same)),
            nan_train=int(torch.count_nonzero(y_odd & ~both_nan & ~same)),
            nan_both=int(torch.count_nonzero(both_nan)),
        )
    )
    return metrics, errors.masked_fill(bad.any(1), float("inf"))


def _ulp_max(x: Tensor, y: Tensor) -> int:
    """Largest number of representable steps between two elements; NaN left out, 0 for dtypes without steps."""
    if x.dtype != y.dtype:
        if not (x.is_floating_point() and y.is_floating_point()):
            return 0
        coarser = min((x.dtype, y.dtype), key=lambda dtype: -torch.finfo(dtype).eps)
        x, y = x.to(coarser), y.to(coarser)
    view = _ULP_VIEWS.get(x.dtype)
    if view is None:
        return 0
    dtype, mask = view
    a, b = _ordered(x, dtype, mask), _ordered(y, dtype, mask)
    steps = (a - b).abs_()
    if x.isnan().any() or y.isnan().any():
        steps.masked_fill_(x.isnan() | y.isnan(), 0)
    return int(steps.max())


def _ordered(values: Tensor, dtype: torch.dtype, mask: int) -> Tensor:
    """Integers in the order of the floats; +0 and −0 are the same."""
    bits = values.contiguous().view(dtype)
    wide = torch.int64 if dtype is torch.int32 else torch.int32
    return torch.where(bits < 0, -(bits & mask).to(wide), bits.to(wide))
