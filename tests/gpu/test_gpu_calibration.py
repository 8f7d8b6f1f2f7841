"""Exact mode on a CUDA device is promised only where it holds."""

import pytest
import torch

pytest.importorskip("triton")

from gpu_cases import small_model

from trainfer.exact.calibration import calibrate
from trainfer.exact.linear import RoutedLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_the_llama_family_passes(architecture):
    assert calibrate(small_model(architecture)).problems == ()


def test_a_split_inner_axis_is_named():
    model = small_model("qwen3")
    for module in model.modules():
        if isinstance(module, RoutedLinear):
            module.__class__ = torch.nn.Linear
    (problem, *_) = calibrate(model).problems
    assert "down_proj (linear 3072 -> 512" in problem.operator


def test_float32_is_refused():
    problems = calibrate(small_model("qwen2", torch.float32)).problems
    assert any("float32 has no row-invariant kernels" in problem.detail for problem in problems)


def test_products_that_are_not_routed_are_named():
    problems = calibrate(small_model("gpt2")).problems
    assert any("c_proj" in problem.operator for problem in problems)
