"""What stands against exact mode on a CUDA device, decided without one."""

import pytest
import torch

from trainfer.exact.attention import AttentionForm
from trainfer.exact.gpu_calibration import attention_problem, kernel_problems


def form(window: int | None = None, softcap: float | None = None) -> AttentionForm:
    return AttentionForm(layer=0, scale=0.125, window=window, softcap=softcap, dropout=0.0)


@pytest.mark.parametrize(
    ("asked", "size", "words"),
    [
        (form(), 64, None),
        (form(window=4096), 64, "window of 4096"),
        (form(softcap=50.0), 64, "soft-capped"),
        (form(), 96, "heads of 96"),
    ],
)
def test_attention_that_no_kernel_computes_is_named(asked, size, words):
    problem = attention_problem(asked, size)
    assert problem is None if words is None else words in str(problem)


def test_float32_is_refused_with_the_keys_to_set():
    details = [detail for _, detail in kernel_problems(torch.float32)]
    assert any("rollout.dtype to bfloat16" in detail for detail in details)
    assert not any("float" in detail for _, detail in kernel_problems(torch.bfloat16))
