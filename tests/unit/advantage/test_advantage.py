"""Group advantages against hand-worked values and properties."""

import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.errors import DataError, RewardError
from trainfer.train.advantage import group_advantages

REWARDS = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)
PAIRS = st.lists(st.tuples(REWARDS, st.integers(0, 3)), max_size=24)


def test_one_right_answer_of_four_stands_three_quarters_over_half_a_deviation():
    first, *others = group_advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7])
    assert first == 0.75 / 0.500001
    assert others == [-0.25 / 0.500001] * 3


def test_the_deviation_is_of_n_minus_one():
    # 1 and 3: mean 2, squared distances 1 + 1 over n-1 = 1, hence sqrt(2).
    assert group_advantages([1.0, 3.0], ["a", "a"]) == pytest.approx(
        [-1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(2) + 1e-6)], rel=1e-15
    )


def test_without_std_only_the_mean_is_taken_off():
    assert group_advantages([1.0, 0.0, 0.0, 3.0], [0] * 4, norm_by_std=False) == [0.0, -1.0, -1.0, 2.0]


def test_a_group_of_one_keeps_its_score():
    assert group_advantages([0.7, 1.0, 0.0], ["alone", 1, 1])[0] == 0.7
    assert group_advantages([-0.5], [0], norm_by_std=False) == [-0.5]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(reward, size):
    assert group_advantages([reward] * size, [0] * size) == [0.0] * size


def test_no_sequences_give_no_advantages():
    assert group_advantages([], []) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(value):
    with pytest.raises(RewardError, match=r"sequence 2 \(group 'b'\).*1 of 4"):
        group_advantages([0.0, 1.0, value, 0.0], ["a", "a", "b", "b"])


@pytest.mark.parametrize(("rewards", "groups"), [([1.0], []), ([1.0], [0, 0]), ([], [0])])
def test_unequal_lengths_are_refused(rewards, groups):
    with pytest.raises(RewardError, match="each sequence needs one of both"):
        group_advantages(rewards, groups)


def test_the_error_is_a_data_error_a_value_error_and_survives_pickling():
    error = pickle.loads(pickle.dumps(RewardError("x")))
    assert isinstance(error, DataError)
    assert isinstance(error, ValueError)
    assert str(error) == "x"


@settings(deadline=None)
@given(PAIRS, st.randoms(use_true_random=False), st.booleans())
def test_permuting_sequences_permutes_advantages_to_the_bit(pairs, random, norm):
    order = list(range(len(pairs)))
    random.shuffle(order)
    plain = group_advantages([r for r, _ in pairs], [g for _, g in pairs], norm_by_std=norm)
    permuted = group_advantages([pairs[i][0] for i in order], [pairs[i][1] for i in order], norm_by_std=norm)
    assert permuted == [plain[i] for i in order]


@settings(deadline=None)
@given(PAIRS)
def test_interleaved_groups_equal_groups_alone(pairs):
    together = group_advantages([r for r, _ in pairs], [g for _, g in pairs])
    for group in {g for _, g in pairs}:
        rewards = [r for r, g in pairs if g == group]
        alone = group_advantages(rewards, [group] * len(rewards))
        assert alone == [a for a, (_, g) in zip(together, pairs, strict=True) if g == group]


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.floats(-50, 50))
def test_a_reward_added_to_all_changes_nothing(rewards, offset):
    base = group_advantages(rewards, [0] * len(rewards), norm_by_std=False)
    shifted = group_advantages([r + offset for r in rewards], [0] * len(rewards), norm_by_std=False)
    assert shifted == pytest.approx(base, abs=1e-12)


GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "verl_core.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", GOLDEN["grpo_advantages"], ids=lambda row: row["id"])
def test_advantages_equal_those_that_verl_gave(row):
    ours = group_advantages(row["rewards"], row["groups"], norm_by_std=row["norm_by_std"])
    # verl divides a group of one by 1 + 1e-6; float32 rewards near 1e4 hold the mean to about 1e-3.
    tolerance = {"float64": 1.1e-6, "float32": 2e-3 if row["id"].startswith("large") else 2e-6}[row["dtype"]]
    assert ours == pytest.approx(row["advantages"], rel=tolerance, abs=tolerance)
