"""Numbers over all elements of a tensor, cheap enough to take of every activation.

Takes a tensor; gives ``Statistics``. One fused pass where the machine has a compiler (``fused``), else a pass of a
vectorised reduction for each number, over data that the module has just written. Non-finite elements are counted,
and the other numbers are then of the finite rest. Sums are float32 or better.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from trainfer.check.dump.records import QUANTILES, Statistics
from trainfer.check.probe import fused
from trainfer.check.probe.fused import SAMPLE

_minimum, _maximum = np.minimum.reduce, np.maximum.reduce

_PLAIN = (Tensor, nn.Parameter)

_SAFE_MAGNITUDE = 1e14
_SAFE_SQUARES = 1e-25
"""Beyond these a float32 sum of squares may have lost something to overflow or underflow."""


class StatisticsTaker:
    """Takes statistics on the CPU, reusing its scratch buffers; one per thread.

    Args:
        with_compiler: False for NumPy alone.
    """

    def __init__(self, *, with_compiler: bool = True) -> None:
        self._flags = np.empty(0, dtype=np.bool_)
        self._with_compiler = with_compiler
        self._probabilities = np.array(QUANTILES)
        self._numbers = np.empty(5 + len(QUANTILES))
        self._where = (
            self._probabilities.ctypes.data,
            len(QUANTILES),
            self._numbers.ctypes.data,
        )

    def take(self, tensor: Tensor) -> Statistics:
        """Statistics of a CPU tensor of any dtype and strides; of complex ones the magnitudes count."""
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            tensor = _real_in_memory_order(tensor.detach())
        count = tensor.numel()
        if count == 0:
            return nothing_finite(0, 0, 0)
        in_one_pass = fused.load() if self._with_compiler and _is_plain_float32(tensor) else None
        if in_one_pass is not None:
            in_one_pass(tensor.data_ptr(), count, *self._where)
            low, high, total, squares, zeros, *quantiles = self._numbers.tolist()
            if _SAFE_SQUARES < squares < math.inf:
                return _all_finite(count, int(zeros), low, high, total / count, squares, tuple(quantiles))
        return self._take_in_passes(tensor.detach().view(-1))

    def _take_in_passes(self, flat: Tensor) -> Statistics:
        values, count = flat.numpy(), flat.numel()
        low, high = float(_minimum(values)), float(_maximum(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            return self._of_finite_rest(values)
        zeros = 0 if low > 0 or high < 0 else self._count_zeros(values)
        if max(-low, high) < _SAFE_MAGNITUDE:
            mean = float(flat.sum()) / count
            squares = float(
                torch.dot(flat, flat)
            )  # NumPy's threads are not torch's, and would fight with them
        else:
            mean = squares = math.inf
        if squares < _SAFE_SQUARES or not math.isfinite(squares):
            wide = values.astype(np.float64)
            mean, squares = float(wide.mean()), float(np.square(wide).sum())
        return _all_finite(count, zeros, low, high, mean, squares, _quantiles(values))

    def _count_zeros(self, values: np.ndarray) -> int:
        if self._flags.size < values.size:
            self._flags = np.empty(values.size, dtype=np.bool_)
        return int(np.count_nonzero(np.equal(values, 0, out=self._flags[: values.size])))

    def _of_finite_rest(self, values: np.ndarray) -> Statistics:
        nan = int(np.count_nonzero(np.isnan(values)))
        inf = int(np.count_nonzero(np.isinf(values)))
        finite = values[np.isfinite(values)].astype(np.float64)
        if finite.size == 0:
            return nothing_finite(values.size, nan, inf)
        return Statistics(
            count=values.size,
            nan=nan,
            inf=inf,
            zeros=int(np.count_nonzero(finite == 0)),
            min=float(finite.min()),
            max=float(finite.max()),
            mean=float(finite.mean()),
            norm=math.sqrt(float(np.square(finite).sum())),
            quantiles=_quantiles(finite),
            quantile_sample=SAMPLE,
        )


def nothing_finite(count: int, nan: int, inf: int) -> Statistics:
    """Statistics of a tensor that has no finite element."""
    return Statistics(
        count=count,
        nan=nan,
        inf=inf,
        zeros=0,
        min=None,
        max=None,
        mean=None,
        norm=None,
        quantiles=None,
        quantile_sample=SAMPLE,
    )


def _all_finite(
    count: int,
    zeros: int,
    low: float,
    high: float,
    mean: float,
    squares: float,
    quantiles: tuple[float, ...],
) -> Statistics:
    return Statistics(
        count=count,
        nan=0,
        inf=0,
        zeros=zeros,
        min=low,
        max=high,
        mean=mean,
        norm=math.sqrt(squares),
        quantiles=quantiles,
        quantile_sample=SAMPLE,
    )


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    """Lower empirical quantiles of an evenly strided sample."""
    sample = values[:: -(-values.size // SAMPLE)].copy()
    sample.sort()
    last = sample.size - 1
    return tuple(sample[[int(p * last) for p in QUANTILES]].tolist())


def _is_plain_float32(tensor: Tensor) -> bool:
    """True where the numbers lie at ``data_ptr`` as they are; not for a wrapper's or a negated view's."""
    return tensor.dtype is torch.float32 and type(tensor) in _PLAIN and not tensor.is_neg()


def _real_in_memory_order(tensor: Tensor) -> Tensor:
    """The same elements as a contiguous float tensor, copied only where it must be."""
    if tensor.is_complex():
        tensor = tensor.abs()
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float() if tensor.dtype.is_floating_point else tensor.double()
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    ordered = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return ordered.contiguous()
