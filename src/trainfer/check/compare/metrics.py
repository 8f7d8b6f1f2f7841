"""Differences of two row matrices: sums over elements, and one error per row.

Takes rows of any dtype, [n, F] on either side; gives ``Metrics`` and float32 errors [n]. Works on chunks that stay in
a core's cache. Narrow floats cost one pass where the machine has a compiler (``fused``), else about twenty (``quick``);
where a value is NaN or infinite, or a dtype is wider than float32, a careful and slower way is taken.
"""

import math

import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor

from trainfer.check.compare import fused
from trainfer.check.compare.quick import SMALL_NORM, QuickComparison
from trainfer.check.compare.records import Metrics
from trainfer.check.compare.ulps import ulp_max

_CHUNK = 1 << 16
"""Elements compared at a time."""
_NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
_WIDE = frozenset({torch.float64, torch.int64, torch.int32, torch.uint32, torch.uint64, torch.complex64})


def compare_rows(
    rollout: Shaped[Tensor, "N F"], train: Shaped[Tensor, "N F"]
) -> tuple[Metrics, Float32[np.ndarray, "N"]]:
    """Compare row i with row i.

    A row's error is the larger of ‖d‖ / max(‖x‖, ‖y‖) and max |d| / max |x|, |y|; infinite where one side is
    NaN or infinite and the other is not the same.
    """
    assert rollout.shape == train.shape, "rows are paired and cut to equal widths before"
    num_rows, width = rollout.shape
    errors = np.zeros(num_rows, dtype=np.float32)
    if num_rows == 0 or width == 0:
        return Metrics(), errors
    rollout, train = rollout.detach().resolve_neg(), train.detach().resolve_neg()
    step = min(num_rows, max(1, _CHUNK // width))
    if rollout.dtype in _NARROW and train.dtype in _NARROW:
        compared = _compare_narrow(rollout, train, step)
        if compared is not None:
            return compared
    total = Metrics()
    for start in range(0, num_rows, step):
        x, y = rollout[start : start + step], train[start : start + step]
        if x.dtype == y.dtype and torch.equal(x, y):
            total = total.plus(_all_equal(x.numel()))
            continue
        block, row_errors = _compare_chunk(x, y)
        total = total.plus(block)
        errors[start : start + step] = row_errors.numpy()
    return total, errors


def _compare_narrow(rollout: Tensor, train: Tensor, step: int) -> fused.Compared | None:
    in_one_pass = fused.load()
    if in_one_pass is not None:
        return fused.compare_fused(in_one_pass, rollout, train, step)
    quick = QuickComparison(rollout, train, step)
    return (quick.metrics(), quick.errors()) if quick.is_valid else None


def _all_equal(elements: int) -> Metrics:
    return Metrics(
        elements=elements, equal=elements, within_thousandth=elements, within_five_thousandths=elements
    )


def _compare_chunk(x: Tensor, y: Tensor) -> tuple[Metrics, Tensor]:
    wide = x.dtype in _WIDE or y.dtype in _WIDE
    given = x, y
    x, y = (x.double(), y.double()) if wide else (x.float(), y.float())
    d = y - x
    magnitude = d.abs()
    sum_abs = _total(magnitude)
    if not math.isfinite(sum_abs):
        return _compare_with_odd_values(x, y, given)
    metrics, errors = _finite_chunk(x, y, d, magnitude, tiny=torch.finfo(x.dtype).tiny)
    return _with(metrics, sum_abs=sum_abs, ulp=ulp_max(*given)), errors


def _finite_chunk(
    x: Tensor, y: Tensor, d: Tensor, magnitude: Tensor, *, tiny: float
) -> tuple[Metrics, Tensor]:
    x_squared, y_squared, d_squared = _dots(x, x), _dots(y, y), _dots(d, d)
    x_abs = x.abs()
    largest_d, largest_x, largest_y = magnitude.amax(1), x_abs.amax(1), y.abs().amax(1)
    if x.dtype == torch.float32 and not _are_good(
        torch.stack([x_squared, y_squared, d_squared]), torch.stack([largest_x, largest_y, largest_d])
    ):
        return _finite_chunk(x.double(), y.double(), d.double(), magnitude.double(), tiny=tiny)
    norm = torch.maximum(x_squared, y_squared).sqrt_()
    errors = torch.maximum(
        d_squared.sqrt() / norm.clamp_(min=tiny),
        largest_d / torch.maximum(largest_x, largest_y).clamp_(min=tiny),
    )
    relative = magnitude.div(x_abs).nan_to_num_(nan=0.0, posinf=0.0)
    ratios = relative.numpy()
    sums = [float(values.sum(dtype=torch.float64)) for values in (x_squared, y_squared, d_squared)]
    metrics = Metrics(
        elements=x.numel(),
        equal=int(np.count_nonzero(d.numpy() == 0)),
        max_abs=float(largest_d.max()),
        sum_relative=_total(relative),
        max_relative=float(ratios.max()),
        within_thousandth=int(np.count_nonzero(ratios < 1e-3)),
        within_five_thousandths=int(np.count_nonzero(ratios < 5e-3)),
        dot=(sums[0] + sums[1] - sums[2]) / 2,
        sum_rollout_squared=sums[0],
        sum_train_squared=sums[1],
        sum_difference_squared=sums[2],
    )
    return metrics, errors.float()


def _are_good(squares: Tensor, largest: Tensor) -> bool:
    """False where float32 sums of squares have overflowed, or may have lost something to underflow."""
    return bool((squares.isfinite() & ((squares >= SMALL_NORM**2) | (largest == 0))).all())


def _total(values: Tensor) -> float:
    """Row sums in the values' dtype, their sum in float64: two fast reductions."""
    return float(values.sum(1).sum(dtype=torch.float64))


def _count(mask: Tensor) -> int:
    """True elements; NumPy compares and counts several times faster than torch does."""
    return int(np.count_nonzero(mask.numpy()))


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def _with(metrics: Metrics, *, sum_abs: float, ulp: int) -> Metrics:
    return metrics.plus(Metrics(sum_abs=sum_abs, ulp_max=ulp))


def _compare_with_odd_values(x: Tensor, y: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Metrics, Tensor]:
    """Some element is NaN or infinite: it is counted, and left out of every sum."""
    x_odd, y_odd = ~x.isfinite(), ~y.isfinite()
    both_nan = x.isnan() & y.isnan()
    same = x == y
    bad = (x_odd | y_odd) & ~same
    out = x_odd | y_odd
    ulp = ulp_max(*(values.masked_fill(out, 0) for values in given))
    x_clean, y_clean = x.masked_fill(out, 0.0), y.masked_fill(out, 0.0)
    d = y_clean - x_clean
    magnitude = d.abs()
    metrics, errors = _finite_chunk(x_clean, y_clean, d, magnitude, tiny=torch.finfo(x.dtype).tiny)
    metrics = _with(metrics, sum_abs=_total(magnitude), ulp=ulp)
    metrics = metrics.plus(
        Metrics(
            equal=-_count(bad),
            within_thousandth=-_count(bad),
            within_five_thousandths=-_count(bad),
            nan_rollout=_count(x_odd & ~both_nan & ~same),
            nan_train=_count(y_odd & ~both_nan & ~same),
            nan_both=_count(both_nan),
        )
    )
    return metrics, errors.masked_fill(bad.any(1), float("inf"))
