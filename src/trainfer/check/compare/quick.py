"""Differences of two matrices of narrow floats in as few passes as they take.

Takes [n, F] float32, bfloat16 or float16 on either side; gives what ``compare_rows`` gives, or says that it cannot:
some value is NaN or infinite, or its square is not a good float32. Numbers of rows are collected first and judged once
for the tensor. For machines without a compiler; others take one pass (``fused``).
"""
# pyright: standard
# (torch.linalg has partial types)

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainfer.check.compare.records import Metrics
from trainfer.check.compare.ulps import ulp_max, ulp_max_of_parts

SMALL_NORM = 1e-16
"""Below it a float32 sum of squares may have lost something to underflow."""
_X, _Y, _D = range(3)
_TINY = float(np.finfo(np.float32).tiny)


class QuickComparison:
    """One comparison in chunks of ``step`` rows, made when it is built."""

    def __init__(self, rollout: Tensor, train: Tensor, step: int) -> None:
        num_rows, width = rollout.shape
        self._norms = torch.zeros(3, num_rows)
        self._largest = torch.zeros(3, num_rows)
        self._scratch = torch.empty(3, step, width)
        self._same_bits = rollout.dtype == train.dtype
        self._bits = {torch.float32: 0, torch.bfloat16: 16}.get(rollout.dtype) if self._same_bits else None
        """How many low bits of a float32 the dtype leaves zero; None where its steps are not float32's."""
        self._elements = rollout.numel()
        self._equal = self._ulp_max = 0
        self._within = [0, 0]
        self._sum_abs = self._sum_relative = self._max_relative = 0.0
        self.is_valid = True
        """False where values are too odd for this way; the numbers are then to be thrown away."""
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            self._add(rollout[start:stop], train[start:stop], start, stop)
            if not self.is_valid:
                return

    def metrics(self) -> Metrics:
        """Sums over all elements."""
        xx, yy, dd = self._norms.double().square_().sum(1).tolist()
        return Metrics(
            elements=self._elements,
            equal=self._equal,
            max_abs=float(self._largest[_D].max()),
            sum_abs=self._sum_abs,
            sum_relative=self._sum_relative,
            max_relative=self._max_relative,
            within_thousandth=self._within[0],
            within_five_thousandths=self._within[1],
            dot=(xx + yy - dd) / 2,
            sum_rollout_squared=xx,
            sum_train_squared=yy,
            sum_difference_squared=dd,
            ulp_max=self._ulp_max,
        )

    def errors(self) -> NDArray[np.float32]:
        """One per row."""
        by_norm, by_element = (
            numbers[_D] / torch.maximum(numbers[_X], numbers[_Y]).clamp_(min=_TINY)
            for numbers in (self._norms, self._largest)
        )
        return torch.maximum(by_norm, by_element).numpy()

    def _add(self, rollout: Tensor, train: Tensor, start: int, stop: int) -> None:
        if self._same_bits and rollout.element_size() < 4 and torch.equal(rollout, train):
            self._add_equal(rollout.numel())
            return
        x, y = rollout.float(), train.float()
        x_values, y_values = x.numpy(), y.numpy()
        equal = int(np.count_nonzero(x_values == y_values))
        if equal == x.numel():
            self._add_equal(equal)
            return
        parts = self._scratch[:, : stop - start]
        torch.abs(x, out=parts[_X])
        torch.abs(y, out=parts[_Y])
        torch.sub(y, x, out=parts[_D]).abs_()
        norms, largest = torch.linalg.vector_norm(parts, dim=2), parts.amax(2)
        self._norms[:, start:stop] = norms
        self._largest[:, start:stop] = largest
        is_lost = (norms < SMALL_NORM) & (largest > 0)
        if not math.isfinite(float(norms.sum())) or bool(is_lost.any()):
            self.is_valid = False
            return
        self._equal += equal
        self._sum_abs += _total(parts[_D])
        self._add_ulps(rollout, train, x_values, y_values, parts)
        self._add_relative(parts)

    def _add_equal(self, elements: int) -> None:
        self._equal += elements
        self._within[0] += elements
        self._within[1] += elements

    def _add_ulps(self, rollout: Tensor, train: Tensor, x: np.ndarray, y: np.ndarray, parts: Tensor) -> None:
        if self._bits is None:
            steps = ulp_max(rollout, train)
        else:
            bits = parts.numpy().view(np.int32)
            steps = ulp_max_of_parts(x.view(np.int32) ^ y.view(np.int32), bits[_X], bits[_Y]) >> self._bits
        self._ulp_max = max(self._ulp_max, steps)

    def _add_relative(self, parts: Tensor) -> None:
        relative = torch.div(parts[_D], parts[_X], out=parts[_D])
        total = _total(relative)
        if not math.isfinite(total):
            total = _total(relative.nan_to_num_(nan=0.0, posinf=0.0))
        ratios = relative.numpy()
        self._sum_relative += total
        self._max_relative = max(self._max_relative, float(ratios.max()))
        self._within[0] += int(np.count_nonzero(ratios < 1e-3))
        self._within[1] += int(np.count_nonzero(ratios < 5e-3))


def _total(values: Tensor) -> float:
    """Row sums in float32, their sum in float64: two fast reductions."""
    return float(values.sum(1).sum(dtype=torch.float64))
