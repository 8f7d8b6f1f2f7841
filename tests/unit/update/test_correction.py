import math

import pytest

from trainfer.train.update.correction import ImportanceLevel, WeightBounds, rollout_weights

OLD, ROLLOUT = [[-1.0, -1.0], [-2.0]], [[-1.0, -2.0], [-1.0]]


def test_token_weights_are_truncated_ratios():
    out = rollout_weights(OLD, ROLLOUT, level=ImportanceLevel.TOKEN, bounds=WeightBounds(upper=2.0))
    assert out.weights == (pytest.approx((1.0, 2.0)), pytest.approx((math.exp(-1),)))
    assert out.statistics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert out.statistics["rollout_corr/rollout_is_mean"] == pytest.approx((3.0 + math.exp(-1)) / 3)


def test_sequence_weights_are_the_truncated_product_for_every_token():
    out = rollout_weights(
        [[-1.0, -1.0], [-2.0]],
        [[-1.2, -1.3], [-1.0]],
        level=ImportanceLevel.SEQUENCE,
        bounds=WeightBounds(upper=1.5),
    )
    assert out.weights == (pytest.approx((1.5, 1.5)), pytest.approx((math.exp(-1),)))
    assert out.statistics["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(0.5))


def test_a_lower_bound_drops_what_lies_outside():
    out = rollout_weights(OLD, ROLLOUT, level=ImportanceLevel.TOKEN, bounds=WeightBounds.parse("0.5_2.0"))
    assert out.weights == ((1.0, 0.0), (0.0,))


def test_normalised_weights_have_mean_one():
    out = rollout_weights(
        OLD, ROLLOUT, level=ImportanceLevel.TOKEN, bounds=WeightBounds(upper=2.0), normalise=True
    )
    assert sum(sum(row) for row in out.weights) == pytest.approx(3.0)


def test_equal_policies_weigh_one_and_use_every_sample():
    out = rollout_weights(
        [[-1.0, -3.0]], [[-1.0, -3.0]], level=ImportanceLevel.TOKEN, bounds=WeightBounds(upper=2.0)
    )
    assert out.weights == ((1.0, 1.0),)
    assert out.statistics["rollout_corr/rollout_is_eff_sample_size"] == 1.0


@pytest.mark.parametrize("text", ["", "0", "-1", "2_0.5", "nan", "1_2_3", "inf"])
def test_bounds_that_are_none_are_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - float() words it
        WeightBounds.parse(text)


def test_other_tokens_on_the_two_sides_are_our_mistake():
    with pytest.raises(AssertionError):
        rollout_weights([[-1.0]], ROLLOUT, level=ImportanceLevel.TOKEN, bounds=WeightBounds(upper=2.0))
