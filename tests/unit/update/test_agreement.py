import math

import numpy as np
import pytest

from trainfer.train.agreement import agreement_metrics, measure


def test_every_token_metric_by_hand():
    result = measure([[-1.0, -2.0]], [[-1.0, -2.5]])
    assert result is not None
    tokens = result.tokens
    assert tokens.abs_diff_mean == 0.25
    assert tokens.abs_diff_max == 0.5
    assert tokens.k1 == -0.25
    assert tokens.k2 == 0.0625
    assert tokens.k3 == pytest.approx((math.exp(0.5) - 0.5 - 1) / 2)
    assert tokens.ess == pytest.approx((1 + math.exp(0.5)) ** 2 / (2 * (1 + math.e)))
    assert tokens.pearson == pytest.approx(1.0)
    assert tokens.bitwise_equal_fraction == 0.5


def test_probability_metrics_are_of_probabilities_with_the_sample_deviation():
    a, b = [math.log(0.5), math.log(0.2), math.log(0.1)], [math.log(0.4), math.log(0.2), math.log(0.3)]
    result = measure([a], [b])
    assert result is not None
    metrics = result.metrics()
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.2)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.1)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.1)
    expected = np.corrcoef([0.5, 0.2, 0.1], [0.4, 0.2, 0.3])[0, 1]
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected)


def test_sequence_metrics_weigh_sequences_alike_whatever_their_length():
    result = measure([[-1.0, -3.0], [-1.0]], [[-1.0, -1.0], [-1.5]])
    assert result is not None
    gap = result.gap
    assert gap.training_log_ppl == pytest.approx((2.0 + 1.0) / 2)
    assert gap.rollout_log_ppl == pytest.approx((1.0 + 1.5) / 2)
    assert gap.training_ppl == pytest.approx((math.exp(2) + math.exp(1)) / 2)
    assert gap.log_ppl_diff == pytest.approx((1.0 - 0.5) / 2)
    assert gap.log_ppl_abs_diff == pytest.approx(0.75)
    assert gap.log_ppl_diff_max == pytest.approx(1.0)
    assert gap.log_ppl_diff_min == pytest.approx(-0.5)
    assert gap.ppl_ratio == pytest.approx((math.exp(1.0) + math.exp(-0.5)) / 2)
    assert gap.kl == pytest.approx((0.0 + 2.0 - 0.5) / 3)
    assert gap.chi2_token == pytest.approx((1 + math.exp(-4) + math.exp(1)) / 3 - 1)
    assert gap.chi2_seq == pytest.approx((math.exp(-4) + math.exp(1)) / 2 - 1)


def test_equal_policies_agree_in_every_number():
    result = measure([[-0.5, -2.0], [-7.0]], [[-0.5, -2.0], [-7.0]])
    assert result is not None
    metrics = result.metrics()
    for name in ("logp_abs_diff_mean", "logp_abs_diff_max", "k1", "k2", "k3"):
        assert str(metrics[f"mismatch/{name}"]) == "0.0"  # not "-0.0"
    assert metrics["mismatch/ess"] == 1.0
    assert metrics["mismatch/bitwise_equal_fraction"] == 1.0
    assert metrics["rollout_corr/ppl_ratio"] == 1.0
    assert metrics["rollout_corr/chi2_seq"] == 0.0


def test_differences_are_binned_by_the_probability_that_the_rollout_gave():
    rollout = [math.log(0.0005), math.log(0.05), math.log(0.6), 0.0]
    result = measure([[p + d for p, d in zip(rollout, (0.4, 0.3, 0.2, -0.1), strict=True)]], [rollout])
    assert result is not None
    metrics = {k.split("/")[-1]: v for k, v in result.metrics().items() if "prob_bin" in k}
    assert metrics == {
        "0-0.001": pytest.approx(0.4),
        "0.01-0.1": pytest.approx(0.3),
        "0.5-0.9": pytest.approx(0.2),
        "0.9-1": pytest.approx(0.1),
    }


def test_a_token_that_one_side_excludes_is_counted_and_kept_out():
    result = measure([[-math.inf, -1.0]], [[-2.0, -1.0]])
    assert result is not None
    assert result.tokens.nonfinite_tokens == 1
    assert result.metrics()["mismatch/logp_abs_diff_max"] == 0.0
    assert result.tokens.bitwise_equal_fraction == 0.5


def test_no_finite_token_gives_nothing_to_measure_and_is_not_equal():
    assert measure([[math.nan]], [[-1.0]]) is None
    assert agreement_metrics([[math.nan], None], [[-1.0], [-2.0]]) == {
        "mismatch/tokens": 1.0,
        "mismatch/bitwise_equal_fraction": 0.0,
        "mismatch/nonfinite_tokens": 1.0,
    }
    assert "mismatch/bitwise_equal_fraction" not in agreement_metrics([None], [[-1.0]])


def test_an_undefined_correlation_is_left_out():
    result = measure([[-1.0]], [[-1.0]])
    assert result is not None
    assert "mismatch/pearson" not in result.metrics()
    assert "training/rollout_probs_diff_std" not in result.metrics()


def test_other_tokens_on_the_two_sides_are_our_mistake():
    with pytest.raises(AssertionError):
        measure([[-1.0]], [[-1.0, -2.0]])
