"""The compiled pass and NumPy's passes find the same differences, whatever the values, dtypes and strides."""

import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainfer.check.compare import fused, metrics
from trainfer.check.compare.metrics import compare_rows
from trainfer.check.compare.records import Metrics

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
COUNTS = ("elements", "equal", "ulp_max", "nan_rollout", "nan_train", "nan_both")
SUMS = ("sum_abs", "dot", "sum_rollout_squared", "sum_train_squared", "sum_difference_squared")


def both_ways(x: Tensor, y: Tensor) -> tuple[tuple[Metrics, np.ndarray], tuple[Metrics, np.ndarray]]:
    """What the compiled pass finds, and what NumPy and torch find."""
    compiled = compare_rows(x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics.fused, "load", lambda: None)
        return compiled, compare_rows(x, y)


def check_same(x: Tensor, y: Tensor) -> None:
    (compiled, errors), (passes, row_errors) = both_ways(x, y)
    assert [getattr(compiled, name) for name in COUNTS] == [getattr(passes, name) for name in COUNTS]
    assert compiled.max_abs == pytest.approx(passes.max_abs, rel=1e-6)
    assert compiled.max_relative == pytest.approx(passes.max_relative, rel=1e-6)
    assert abs(compiled.within_thousandth - passes.within_thousandth) <= 2, "beside the bound either is right"
    assert abs(compiled.within_five_thousandths - passes.within_five_thousandths) <= 2
    scale = max(passes.sum_rollout_squared, passes.sum_train_squared)
    for name in SUMS:
        assert getattr(compiled, name) == pytest.approx(getattr(passes, name), rel=1e-5, abs=1e-6 * scale)
    assert compiled.sum_relative == pytest.approx(passes.sum_relative, rel=1e-4)
    assert compiled.cosine == pytest.approx(passes.cosine, abs=1e-6)
    assert np.allclose(errors, row_errors, rtol=1e-5, atol=0)
    assert np.array_equal(errors == 0, row_errors == 0)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _off(x: Tensor, by: float = 1e-3) -> Tensor:
    return x * (1 + by * _draw(*x.shape, seed=9).to(x.dtype))


def _with(x: Tensor, *values: tuple[int, int, float]) -> Tensor:
    x = x.clone()
    for row, column, value in values:
        x[row, column] = value
    return x


WIDE = _draw(90, 1500)
PAIRS = {
    "one_element": (torch.tensor([[1.0]]), torch.tensor([[1.5]])),
    "column": (_draw(700, 1), _off(_draw(700, 1))),
    "many_chunks_some_equal": (WIDE, torch.cat([WIDE[:45], _off(WIDE[45:])])),
    "last_element": (WIDE, _with(WIDE, (89, 1499, 0.5))),
    "wider_than_a_chunk": (_draw(2, 70_000), _off(_draw(2, 70_000))),
    "equal": (WIDE, WIDE.clone()),
    "signed_zeros": (torch.zeros(4, 9), -torch.zeros(4, 9)),
    "zeros_on_one_side": (torch.zeros(4, 9), _draw(4, 9)),
    "all_zero_rows": (_with(torch.zeros(4, 9), (2, 2, 1.0)), torch.zeros(4, 9)),
    "signs": (_draw(50, 60), -_draw(50, 60)),
    "denormal": (_draw(30, 40) * 1e-40, _off(_draw(30, 40), 0.1) * 1e-40),
    "denormal_beside_ordinary": (_with(_draw(4, 8), (1, 1, 1e-42)), _draw(4, 8)),
    "tiny_gradients": (_draw(30, 40) * 1e-25, _off(_draw(30, 40), 0.1) * 1e-25),
    "huge": (_draw(30, 40) * 1e30, _off(_draw(30, 40), 0.1) * 1e30),
    "largest": (torch.full((2, 3), 3e38), torch.full((2, 3), -3e38)),
    "nan_on_one_side": (WIDE, _with(WIDE, (3, 3, math.nan))),
    "nan_on_both_sides": (_with(WIDE, (3, 3, math.nan)), _with(WIDE, (3, 3, math.nan))),
    "negative_nan": (-_with(WIDE, (3, 3, math.nan)), -_with(WIDE, (3, 3, math.nan))),
    "infinite_on_one_side": (WIDE, _with(WIDE, (3, 3, -math.inf))),
    "infinite_on_both_sides": (_with(WIDE, (3, 3, math.inf)), _with(WIDE, (3, 3, math.inf))),
    "infinite_in_equal_rows": (_with(WIDE, (3, 3, math.inf)), _with(WIDE, (3, 3, math.inf), (89, 0, 1.0))),
    "no_rows": (torch.empty(0, 4), torch.empty(0, 4)),
    "no_columns": (torch.empty(4, 0), torch.empty(4, 0)),
    "columns_of_a_wider_matrix": (WIDE[:, 100:300], _off(WIDE)[:, 100:300]),
    "transposed": (_draw(40, 60).t(), _off(_draw(40, 60)).t()),
    "one_row_for_all": (_draw(1, 60).expand(40, 60), _off(_draw(40, 60))),
    "backwards": (torch.complex(_draw(9, 9), _draw(9, 9)).conj().imag, _draw(9, 9)),
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_both_ways_find_the_same(name: str):
    check_same(*PAIRS[name])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", list(PAIRS))
def test_halves(name: str, dtype: torch.dtype):
    x, y = PAIRS[name]
    check_same(x.to(dtype), y.to(dtype))


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32)],
)
@pytest.mark.parametrize("name", ["many_chunks_some_equal", "signs", "nan_on_one_side", "column", "equal"])
def test_unlike_dtypes(name: str, dtypes: tuple[torch.dtype, torch.dtype]):
    x, y = PAIRS[name]
    check_same(x.to(dtypes[0]), y.to(dtypes[1]))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_widened_rightly(dtype: torch.dtype):
    """Against zeros: the sums are then those of the values themselves, and the distance their place among the floats."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every[every.isfinite()][:, None]
    found, errors = compare_rows(x, torch.zeros_like(x))
    assert fused.load() is not None
    assert found.sum_rollout_squared == pytest.approx(x.double().square().sum().item(), rel=1e-12)
    assert found.ulp_max == int(x.abs().contiguous().view(torch.int16).max())
    smallest = torch.finfo(torch.float32).tiny
    assert np.array_equal(errors, (x[:, 0].double().abs() / smallest).clamp(max=1).float().numpy())


@st.composite
def pairs_of_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Rows of any bits at all, some of them equal."""
    dtype = draw(st.sampled_from(DTYPES))
    rows, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    words = torch.int32 if dtype is torch.float32 else torch.int16
    low, high = torch.iinfo(words).min, torch.iinfo(words).max
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randint(low, high, (rows, width), generator=generator, dtype=words)
    y = x + torch.randint(-draw(st.integers(0, 3)), 3, (rows, width), generator=generator, dtype=words)
    if draw(st.booleans()):
        magnitudes = 0x7F0FFFFF if dtype is torch.float32 else 0x7B00  # no NaN, nothing infinite
        x, y = x & magnitudes, y & magnitudes
    y = torch.where(torch.rand(rows, 1, generator=generator) < 0.5, x, y)
    return x.view(dtype), y.view(dtype)


@given(pairs_of_rows())
@settings(deadline=None, max_examples=200)
def test_any_bits_give_the_same_counts(pair: tuple[Tensor, Tensor]):
    (compiled, errors), (passes, row_errors) = both_ways(*pair)
    assert [getattr(compiled, name) for name in COUNTS] == [getattr(passes, name) for name in COUNTS]
    assert compiled.max_abs == pytest.approx(passes.max_abs, rel=1e-6)
    assert np.array_equal(errors == 0, row_errors == 0)
    assert np.array_equal(np.isinf(errors), np.isinf(row_errors))
    assert np.allclose(errors, row_errors, rtol=1e-4, atol=0)


def test_loading_leaves_denormals_alone():
    """A library linked with -ffast-math would make the process flush them to zero from then on."""
    program = (
        "import torch; from trainfer.check.compare import fused; assert fused.load() is not None;"
        "print(float(torch.tensor(1e-40) * 1.0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0
