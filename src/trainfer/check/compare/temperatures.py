"""Temperatures that nobody declared: found from the recorded log-probs themselves.

Takes logits, targets and recorded log-probs of some tokens; gives the temperature whose log-softmax comes nearest, and the number
that a log-softmax was divided by.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_RANGE = (1 / 32, 32.0)
_STEPS, _HALVINGS = 21, 45
_ROWS = 16


def nearest_temperature(logits_SV: Tensor, targets_S: Tensor, recorded_S: NDArray[np.float64]) -> float:
    """T that log_softmax(logits / T) at the targets comes nearest to the recorded values with, by least squares.

    log p is concave in 1 / T, so the error has few minima: the best of a grid is refined by golden section.
    """
    chosen = torch.linspace(0, len(targets_S) - 1, min(len(targets_S), _ROWS)).long()
    logits, targets = logits_SV[chosen].double(), targets_S[chosen, None]
    recorded = torch.from_numpy(recorded_S)[chosen]  # pyright: ignore[reportUnknownMemberType]

    def off(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        derived = scaled.gather(1, targets)[:, 0] - scaled.logsumexp(1)
        return float((derived - recorded).square().sum().nan_to_num(nan=torch.inf))

    step = math.log(_RANGE[1] / _RANGE[0]) / (_STEPS - 1)
    best = min((math.log(_RANGE[0]) + step * place for place in range(_STEPS)), key=off)
    low, high = best - step, best + step
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(_HALVINGS):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if off(a) < off(b) else (a, high)
    return math.exp((low + high) / 2)


def common_divisor(plain_S: NDArray[np.float64], recorded_S: NDArray[np.float64]) -> float | None:
    """C where recorded ≈ plain / c; None where the values are too small to tell."""
    usable = (np.abs(recorded_S) > 1e-3) & np.isfinite(recorded_S) & np.isfinite(plain_S)
    if not usable.any():
        return None
    ratio = float(np.median(plain_S[usable] / recorded_S[usable]))
    return ratio if _RANGE[0] < ratio < _RANGE[1] else None


def as_written(value: float) -> list[float]:
    """The number as people write it, and as found."""
    return list(dict.fromkeys([float(f"{value:.{digits}g}") for digits in (1, 2, 3)] + [value]))
