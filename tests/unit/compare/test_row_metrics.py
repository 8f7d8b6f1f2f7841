"""Metrics of row matrices, worked by hand and against float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.check.compare.metrics import compare_rows
from trainfer.check.compare.records import Metrics


def test_by_hand():
    metrics, errors = compare_rows(
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 4.0], [3.0, 4.0]])
    )
    assert (metrics.elements, metrics.equal) == (4, 3)
    assert (metrics.max_abs, metrics.mean_abs, metrics.max_relative) == (2.0, 0.5, 1.0)
    assert errors[0] == pytest.approx(0.5), "max |d| / max |value| = 2/4; the norms give 2/sqrt(17)"
    assert errors[1] == 0


def test_a_single_wrong_element_in_a_wide_row_is_seen():
    x = torch.ones(1, 4096)
    y = x.clone()
    y[0, 7] = 0.5
    assert compare_rows(x, y)[1][0] == pytest.approx(0.5)


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 3), (torch.bfloat16, 3), (torch.float16, 3)])
def test_ulps_are_counted_in_the_dtype(dtype: torch.dtype, steps: int):
    x = torch.tensor([[1.0, -2.0]], dtype=dtype)
    y = x.clone()
    for _ in range(steps):
        y = torch.nextafter(y.float(), torch.tensor(9.0)).to(dtype) if dtype is torch.float32 else y
    if dtype is not torch.float32:
        y = (x.view(torch.int16) + torch.tensor([[steps, -steps]], dtype=torch.int16)).view(dtype)
    assert compare_rows(x, y)[0].ulp_max == steps


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 23), (torch.bfloat16, 7), (torch.float16, 10)])
def test_ulps_across_zero_and_signed_zeros(dtype: torch.dtype, bits: int):
    tiny = torch.finfo(dtype).smallest_normal * 2.0**-bits
    x, y = torch.tensor([[tiny, 0.0]], dtype=dtype), torch.tensor([[-tiny, -0.0]], dtype=dtype)
    metrics, _ = compare_rows(x, y)
    assert (metrics.ulp_max, metrics.equal) == (2, 1)


def test_the_largest_distance_there_is_fits():
    huge = torch.finfo(torch.float32).max
    assert compare_rows(torch.tensor([[huge]]), torch.tensor([[-huge]]))[0].ulp_max == 2 * 0x7F7FFFFF


def test_unlike_dtypes_are_measured_in_steps_of_the_coarser():
    metrics, errors = compare_rows(
        torch.tensor([[1.0, 1.001]]), torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    )
    assert metrics.ulp_max == 0
    assert errors[0] > 0


def test_nan_and_infinite_elements_are_counted_and_left_out():
    x = torch.tensor([[math.nan, 1.0, math.inf, -3.0], [math.nan, 1.0, math.inf, -3.0]])
    y = torch.tensor([[math.nan, 1.0, math.inf, -3.0], [0.0, 2.0, math.inf, -math.inf]])
    metrics, errors = compare_rows(x, y)
    assert (metrics.nan_both, metrics.nan_rollout, metrics.nan_train) == (1, 1, 1)
    assert metrics.max_abs == 1.0
    assert (errors == math.inf).all(), "NaN beside NaN is not called equal"


def test_huge_values_do_not_overflow():
    metrics, errors = compare_rows(torch.full((1, 4), 1e30), torch.full((1, 4), 2e30))
    assert metrics.cosine == pytest.approx(1.0)
    assert errors[0] == pytest.approx(0.5)


def test_whole_numbers_and_booleans():
    assert compare_rows(torch.tensor([[3, -7]]), torch.tensor([[3, 2**40]]))[1][0] > 0
    assert compare_rows(torch.tensor([[True, False]]), torch.tensor([[True, False]]))[0].equal == 2
    assert compare_rows(torch.tensor([[True, False]]), torch.tensor([[True, True]]))[0].max_abs == 1.0


@given(st.integers(1, 5), st.integers(1, 70_000), st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_sums_agree_with_float64(rows: int, width: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    y = x + torch.randn(rows, width, generator=generator) * 1e-3
    y[0] = x[0]
    metrics, errors = compare_rows(x, y)
    a, b = x.double(), y.double()
    off = (b - a).abs()
    assert metrics.elements == rows * width
    assert metrics.mean_abs == pytest.approx(off.mean().item(), rel=1e-4, abs=1e-12)
    assert metrics.max_abs == pytest.approx(off.max().item(), rel=1e-6)
    assert errors[0] == 0
    cosine = torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()
    assert metrics.cosine == pytest.approx(cosine, abs=1e-5)
    assert np.isfinite(errors).all()


def test_blocks_add_up():
    x, y = torch.randn(6, 5), torch.randn(6, 5)
    whole, errors = compare_rows(x, y)
    parts = [compare_rows(x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)]
    total = Metrics()
    for metrics, _ in parts:
        total = total.plus(metrics)
    assert total.sum_abs == pytest.approx(whole.sum_abs)
    assert (total.equal, total.max_abs, total.ulp_max) == (whole.equal, whole.max_abs, whole.ulp_max)
    assert np.array_equal(np.concatenate([e for _, e in parts]), errors)
