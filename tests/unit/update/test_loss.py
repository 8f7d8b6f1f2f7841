import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from trainfer.train.update.aggregate import LossAggregation, MiniBatchTotals, token_weight
from trainfer.train.update.kl import KlEstimator
from trainfer.train.update.loss import LossInputs, LossSettings, grpo_loss

DEFAULT = LossSettings()


def inputs(ratios, advantages, *, mask=None, weights=None, old=-2.0, **kwargs):
    """Token-mean inputs whose probability ratios new / old are given."""
    count = len(ratios)
    old_logprobs = torch.full((count,), old, dtype=torch.float64)
    logprobs = (old_logprobs + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return LossInputs(
        logprobs_S=logprobs,
        old_logprobs_S=old_logprobs,
        advantages_S=torch.tensor(advantages, dtype=torch.float64),
        mask_S=torch.tensor(mask or [True] * count),
        token_weights_S=torch.tensor(weights or [1.0 / count] * count, dtype=torch.float64),
        entropies_S=kwargs.pop("entropies_S", torch.zeros(count, dtype=torch.float64)),
        **kwargs,
    )


def gradient(given_inputs, loss_settings=DEFAULT):
    (result,) = torch.autograd.grad(grpo_loss(given_inputs, loss_settings).loss, given_inputs.logprobs_S)
    return result.tolist()


def test_on_policy_loss_is_minus_the_mean_advantage_and_its_gradient_minus_advantage_over_count():
    given_inputs = inputs([1.0, 1.0], [1.0, -0.5])
    assert grpo_loss(given_inputs, DEFAULT).loss.item() == pytest.approx(-0.25)
    assert gradient(given_inputs) == pytest.approx([-0.5, 0.25])


def test_gain_stops_at_the_upper_clip():
    out = grpo_loss(inputs([1.5], [1.0]), DEFAULT)
    assert out.loss.item() == pytest.approx(-1.2)
    assert out.clipped_tokens.item() == 1.0
    assert gradient(inputs([1.5], [1.0])) == [0.0]


def test_a_negative_advantage_stops_gaining_at_the_lower_clip():
    out = grpo_loss(inputs([0.5], [-1.0]), DEFAULT)
    assert out.loss.item() == pytest.approx(0.8)
    assert out.clipped_tokens.item() == 1.0


def test_the_two_clips_are_separate():
    out = grpo_loss(inputs([1.25, 0.85], [1.0, -1.0]), LossSettings(clip_ratio_low=0.1, clip_ratio_high=0.3))
    assert out.loss.item() == pytest.approx((-1.25 + 0.9) / 2)
    assert out.clipped_tokens.item() == 1.0


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    out = grpo_loss(inputs([5.0, 5.0], [-1.0, 1.0]), DEFAULT)
    assert out.loss.item() == pytest.approx((3.0 - 1.2) / 2)
    assert out.clipped_lower_tokens.item() == 1.0
    assert gradient(inputs([5.0], [-1.0])) == [0.0]


def test_dual_clip_lets_a_ratio_below_its_bound_pass():
    out = grpo_loss(inputs([2.5], [-1.0]), DEFAULT)
    assert out.loss.item() == pytest.approx(2.5)
    assert out.clipped_lower_tokens.item() == 0.0


def test_the_log_ratio_is_clamped_to_twenty():
    given_inputs = inputs([1.0], [-1.0], old=-40.0)
    far = LossInputs(
        logprobs_S=torch.tensor([-1.0], dtype=torch.float64),
        old_logprobs_S=given_inputs.old_logprobs_S,
        advantages_S=given_inputs.advantages_S,
        mask_S=given_inputs.mask_S,
        token_weights_S=given_inputs.token_weights_S,
        entropies_S=given_inputs.entropies_S,
    )
    out = grpo_loss(far, LossSettings(clip_ratio_c=1e12))
    assert out.ppo_kl_sum.item() == -20.0
    assert out.loss.item() == pytest.approx(math.exp(20.0))


def test_ppo_kl_is_old_minus_new():
    out = grpo_loss(inputs([math.e, 1.0], [0.0, 0.0]), DEFAULT)
    assert out.ppo_kl_sum.item() == pytest.approx(-1.0)


def test_a_masked_token_counts_nowhere_whatever_it_holds():
    out = grpo_loss(
        inputs(
            [1.5, 2.0],
            [1.0, math.nan],
            mask=[True, False],
            weights=[1.0, 1.0],
            entropies_S=torch.tensor([0.5, math.nan], dtype=torch.float64),
        ),
        LossSettings(entropy_coeff=0.1),
    )
    assert out.loss.item() == pytest.approx(-1.2 - 0.05)
    assert out.ppo_kl_sum.item() == pytest.approx(-math.log(1.5))
    assert out.clipped_tokens.item() == 1.0


def test_entropy_lowers_and_kl_raises_the_loss():
    given_inputs = inputs(
        [1.0, 1.0],
        [1.0, 1.0],
        entropies_S=torch.tensor([0.4, 0.8], dtype=torch.float64),
        ref_logprobs_S=torch.tensor([-2.5, -1.5], dtype=torch.float64),
    )
    out = grpo_loss(
        given_inputs, LossSettings(entropy_coeff=0.1, kl_loss_coef=0.01, kl_estimator=KlEstimator.K2)
    )
    assert out.entropy.item() == pytest.approx(0.6)
    assert out.kl_loss.item() == pytest.approx(0.125)
    assert out.loss.item() == pytest.approx(-1.0 - 0.06 + 0.00125)


def test_rollout_weights_multiply_the_policy_loss_alone():
    given_inputs = inputs(
        [1.0, 1.0],
        [1.0, 1.0],
        rollout_weights_S=torch.tensor([2.0, 0.5], dtype=torch.float64),
        entropies_S=torch.tensor([1.0, 1.0], dtype=torch.float64),
    )
    out = grpo_loss(given_inputs, DEFAULT)
    assert out.pg_loss.item() == pytest.approx(-1.25)
    assert out.entropy.item() == pytest.approx(1.0)


@settings(deadline=None, max_examples=60)
@given(
    ratios=st.lists(st.floats(0.05, 6.0), min_size=1, max_size=6),
    advantage=st.floats(-2.0, 2.0).filter(lambda a: abs(a) > 1e-3),
    estimator=st.sampled_from(list(KlEstimator)),
)
def test_the_gradient_is_the_finite_difference_of_the_loss(ratios, advantage, estimator):
    loss_settings = LossSettings(kl_loss_coef=0.3, kl_estimator=estimator)
    bounds = (0.8, 1.2, 3.0, math.e)  # where the loss has a kink; e is the ref's: |log p - log q| = 0
    ratios = [r if all(abs(r - bound) > 1e-3 for bound in bounds) else r + 2.5e-3 for r in ratios]
    advantages = [advantage * (-1) ** i for i in range(len(ratios))]

    def build(logprobs):
        return LossInputs(
            logprobs_S=logprobs,
            old_logprobs_S=torch.full((len(ratios),), -2.0, dtype=torch.float64),
            advantages_S=torch.tensor(advantages, dtype=torch.float64),
            mask_S=torch.ones(len(ratios), dtype=torch.bool),
            token_weights_S=torch.full((len(ratios),), 0.25, dtype=torch.float64),
            entropies_S=torch.zeros(len(ratios), dtype=torch.float64),
            ref_logprobs_S=torch.full((len(ratios),), -1.0, dtype=torch.float64),
        )

    at = (torch.tensor(ratios, dtype=torch.float64).log() - 2.0).requires_grad_()
    exact = torch.autograd.grad(grpo_loss(build(at), loss_settings).loss, at)[0]
    for index in range(len(ratios)):
        step = torch.zeros_like(at)
        step[index] = 1e-6
        upper = grpo_loss(build((at + step).detach()), loss_settings).loss
        lower = grpo_loss(build((at - step).detach()), loss_settings).loss
        assert ((upper - lower) / 2e-6).item() == pytest.approx(exact[index].item(), rel=1e-5, abs=1e-7)


def test_tensors_of_unequal_length_are_refused_in_tests():
    with pytest.raises(TypeCheckError):
        inputs([1.0, 1.0], [1.0, 1.0], entropies_S=torch.zeros(3, dtype=torch.float64))


def test_a_mask_of_numbers_is_refused_in_tests():
    with pytest.raises(TypeCheckError):
        inputs([1.0, 1.0], [1.0, 1.0], mask=[1.0, 1.0])


def test_weights_of_each_aggregation_mode_by_hand():
    totals = MiniBatchTotals(tokens=4, sequences=2)

    def weight(mode):
        return token_weight(LossAggregation(mode), trained_tokens=3, totals=totals, horizon=10)

    assert weight("token-mean") == 1 / 4
    assert weight("token-sum") == 1.0
    assert weight("seq-mean-token-sum") == 1 / 2
    assert weight("seq-mean-token-mean") == 1 / 6
    assert weight("seq-mean-token-sum-norm") == 1 / 20


def test_a_mini_batch_without_trained_tokens_has_finite_weights():
    empty = MiniBatchTotals(tokens=0, sequences=1)
    for mode in LossAggregation:
        assert math.isfinite(token_weight(mode, trained_tokens=0, totals=empty, horizon=1))
