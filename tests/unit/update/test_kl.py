import math

import pytest
import torch

from trainfer.train.update.kl import KlEstimator, token_kl

P = [-1.0, -2.0, -0.5]
Q = [-1.5, -2.0, -0.25]


def kl(name, **kwargs):
    logprobs = torch.tensor(P, dtype=torch.float64, requires_grad=True)
    value = token_kl(logprobs, torch.tensor(Q, dtype=torch.float64), KlEstimator.of(name), **kwargs)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    return value.tolist(), gradient.tolist()


def test_k1_is_the_difference_and_its_gradient_is_one():
    assert kl("k1") == kl("kl") == ([0.5, 0.0, -0.25], [1.0, 1.0, 1.0])


def test_abs_is_the_absolute_difference():
    assert kl("abs")[0] == [0.5, 0.0, 0.25]


def test_k2_is_half_the_square_and_its_gradient_is_the_difference():
    assert kl("k2") == kl("mse") == ([0.125, 0.0, 0.03125], [0.5, 0.0, -0.25])


def test_k3_is_r_minus_one_minus_log_r():
    value, gradient = kl("low_var_kl")
    assert value == pytest.approx([math.exp(-0.5) - 1 + 0.5, 0.0, math.exp(0.25) - 1 - 0.25])
    # d/dx (exp(q - x) - (q - x) - 1) = 1 - exp(q - x)
    assert gradient == pytest.approx([1 - math.exp(-0.5), 0.0, 1 - math.exp(0.25)])


def test_k3_is_clamped_to_ten_and_then_has_no_gradient():
    logprobs = torch.tensor([-30.0], requires_grad=True)
    value = token_kl(logprobs, torch.tensor([-1.0]), KlEstimator.K3)
    value.sum().backward()
    assert value.item() == 10.0
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_straight_through_keeps_the_value_and_takes_the_gradient_of_k2():
    value, gradient = kl("k3", straight_through=True)
    assert value == pytest.approx(kl("k3")[0])
    assert gradient == kl("k2")[1]


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="full"):
        KlEstimator.of("full")
