"""The compiled pass and NumPy's passes give the same statistics, and loading the one changes no arithmetic."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trainfer.check.dump.native import library_path
from trainfer.check.dump.records import QUANTILES
from trainfer.check.probe import fused
from trainfer.check.probe.statistics import SAMPLE, StatisticsTaker

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def _draw(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


TENSORS = {
    "one": torch.tensor(-2.5),
    "shorter_than_the_sample": _draw(7),
    "the_sample": _draw(SAMPLE),
    "one_more": _draw(SAMPLE + 1),
    "no_whole_block": _draw(2047),
    "blocks_and_a_rest": _draw(2048 * 5 + 3),
    "large": _draw(1 << 20),
    "zeros": torch.zeros(5000),
    "signed_zeros": torch.tensor([0.0, -0.0, 1.0, -0.0] * 900),
    "all_negative": -_draw(5000).abs() - 1,
    "denormal": _draw(5000) * 1e-40,
    "tiny_gradients": _draw(5000) * 1e-20,
    "huge": _draw(5000) * 1e30,
    "nan": _draw(5000).index_fill(0, torch.tensor([3, 4999]), math.nan),
    "infinite": _draw(5000).index_fill(0, torch.tensor([2048]), -math.inf),
    "nothing_finite": torch.full((3000,), math.inf),
    "transposed": _draw(6000).view(60, 100).t(),
    "with_gaps": _draw(6000)[::3],
    "half": _draw(6000).bfloat16(),
    "integers": torch.arange(-50, 4000),
    "negated_view": torch.complex(_draw(3000), _draw(3000, 1)).conj().imag,
    "parameter": torch.nn.Parameter(_draw(3000)),
    "empty": torch.empty(0, 4),
}


@needs_compiler
@pytest.mark.parametrize("name", list(TENSORS))
def test_both_ways_give_the_same(name: str):
    compiled, passes = (StatisticsTaker(with_compiler=w).take(TENSORS[name]) for w in (True, False))
    assert fused.load() is not None
    counts = [(s.count, s.nan, s.inf, s.zeros, s.min, s.max, s.quantiles) for s in (compiled, passes)]
    assert counts[0] == counts[1]
    if passes.mean is None:
        assert (compiled.mean, compiled.norm) == (None, None)
        return
    assert compiled.mean == pytest.approx(passes.mean, rel=1e-4, abs=1e-6)
    assert compiled.norm == pytest.approx(passes.norm, rel=1e-5)


@needs_compiler
def test_sums_are_as_good_as_float64():
    values = _draw(3_000_001, 4) + 0.25
    taken, wide = StatisticsTaker().take(values), values.double().numpy()
    assert taken.mean == pytest.approx(wide.mean(), rel=1e-6)
    assert taken.norm == pytest.approx(np.linalg.norm(wide), rel=1e-6)
    sample = np.sort(values.numpy()[:: -(-values.numel() // SAMPLE)])
    assert taken.quantiles == tuple(sample[[int(p * (len(sample) - 1)) for p in QUANTILES]].tolist())


@needs_compiler
def test_loading_leaves_denormals_alone():
    """A library linked with -ffast-math would make the process flush them to zero from then on."""
    program = (
        "import torch; from trainfer.check.probe import fused; assert fused.load() is not None;"
        "print(float(torch.tensor(1e-40) * 1.0), float(torch.full((64,), 1e-40).mul(0.5).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(float(number) > 0 for number in done.stdout.split())


def test_without_a_compiler_numpy_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    fused.load.cache_clear()
    try:
        assert fused.load() is None
        assert StatisticsTaker().take(torch.tensor([3.0, 4.0])).norm == 5.0
    finally:
        fused.load.cache_clear()


@needs_compiler
def test_a_library_that_others_can_write_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fused.load.cache_clear()
    try:
        assert fused.load() is not None
        library_path("statistics", fused.SOURCE).chmod(0o777)
        fused.load.cache_clear()
        assert fused.load() is None
    finally:
        fused.load.cache_clear()


@needs_compiler
def test_a_compiler_that_fails_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fused.load.cache_clear()
    try:
        assert fused.load() is None
        assert not list((tmp_path / "cache").rglob("*.so"))
    finally:
        fused.load.cache_clear()
