"""Compares tensors of which only numbers were kept.

Takes pairs of records with statistics; gives ``Metrics`` over the numbers and one error per pair. It cannot prove
equality of values, only of their count, extremes, mean and norm, and says so.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainfer.check.compare.records import Metrics
from trainfer.check.dump.records import Statistics, TensorRecord


def compare_statistics(
    pairs: Sequence[tuple[TensorRecord, TensorRecord]],
) -> tuple[Metrics, NDArray[np.float32], tuple[str, ...]]:
    """One error per pair: the largest difference of min, max, mean and norm/√n, relative to the norm/√n."""
    total, errors, notes = Metrics(), list[float](), dict[str, None]()
    for first, second in pairs:
        a, b = first.statistics, second.statistics
        if a is None or b is None:
            errors.append(float("inf"))
            notes["statistics on one side only"] = None
            continue
        if first.shape != second.shape:
            notes[f"shape {first.shape} in the rollout and {second.shape} in training"] = None
            errors.append(float("inf"))
            continue
        metrics, error = _compare(a, b)
        total = total.plus(metrics)
        errors.append(error)
    return total, np.array(errors, dtype=np.float32), ("only statistics were captured", *notes)


def _compare(a: Statistics, b: Statistics) -> tuple[Metrics, float]:
    same = a == b
    odd_a, odd_b = a.nan + a.inf, b.nan + b.inf
    values = [
        (x, y)
        for x, y in ((a.min, b.min), (a.max, b.max), (a.mean, b.mean), (_rms(a), _rms(b)))
        if x is not None and y is not None
    ]
    differences = [abs(y - x) for x, y in values]
    scale = max((abs(value) for value in (_rms(a) or 0.0, _rms(b) or 0.0)), default=0.0)
    largest = max(differences, default=0.0)
    error = 0.0 if largest == 0 else largest / scale if scale else float("inf")
    if (odd_a, a.nan) != (odd_b, b.nan):
        error = float("inf")
    metrics = Metrics(
        elements=a.count,
        equal=a.count if same else 0,
        max_abs=largest,
        sum_abs=largest * a.count,
        sum_rollout_squared=(a.norm or 0.0) ** 2,
        sum_train_squared=(b.norm or 0.0) ** 2,
        dot=(a.norm or 0.0) * (b.norm or 0.0),
        nan_rollout=max(0, odd_a - odd_b),
        nan_train=max(0, odd_b - odd_a),
        nan_both=min(a.nan, b.nan),
    )
    return metrics, error


def _rms(statistics: Statistics) -> float | None:
    finite = statistics.count - statistics.nan - statistics.inf
    return None if statistics.norm is None or finite == 0 else statistics.norm / finite**0.5
