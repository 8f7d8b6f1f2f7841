"""Packing: nothing lost, limits kept, even, the same every time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.errors import PlanError
from trainfer.plan.packing import balance, micro_batches

LENGTHS = st.lists(st.integers(min_value=0, max_value=300), max_size=60)


def tokens_of(parts, lengths):
    return [sum(lengths[index] for index in part) for part in parts]


def test_two_ranks_share_a_worked_example_evenly():
    # 8+1 against 7+2: slices (8,7) and (2,1) are merged crosswise.
    assert balance([1, 8, 2, 7], 2) == [[0, 1], [2, 3]]


def test_the_public_example_makes_15_micro_batches_of_8():
    parts = micro_batches([100] * 120, max_sequences=8, max_tokens=None)
    assert [len(part) for part in parts] == [8] * 15


def test_a_micro_size_that_does_not_divide_gives_even_counts():
    assert sorted(map(len, micro_batches([5] * 10, max_sequences=4, max_tokens=None))) == [3, 3, 4]


def test_one_long_and_many_short_need_two_budgets_only():
    assert micro_batches([100, 20, 20, 20, 20, 20], max_sequences=None, max_tokens=100) == [
        [0],
        [1, 2, 3, 4, 5],
    ]


def test_full_sequences_cannot_share_a_budget():
    # Two sequences of 2048 exceed 3000, so 160 of them are 160 micro-batches and not ceil(160 * 2048 / 3000) = 110.
    assert len(micro_batches([2048] * 160, max_sequences=None, max_tokens=3000)) == 160


def test_a_sequence_over_the_budget_is_named():
    with pytest.raises(PlanError, match=r"sequence of 12 tokens.*10 tokens.*at least 12"):
        micro_batches([3, 12], max_sequences=None, max_tokens=10)


def test_more_micro_batches_than_sequences_are_refused():
    with pytest.raises(PlanError, match="2 sequences cannot fill 3"):
        micro_batches([1, 1], max_sequences=None, max_tokens=10, at_least=3)


@pytest.mark.parametrize("limits", [(None, None), (1, 1)])
def test_exactly_one_limit_is_given(limits):
    with pytest.raises(ValueError, match="exactly one"):
        micro_batches([1], max_sequences=limits[0], max_tokens=limits[1])


def test_no_sequences_make_no_micro_batches():
    assert micro_batches([], max_sequences=3, max_tokens=None) == []
    assert balance([], 3) == [[], [], []]


@given(LENGTHS, st.integers(min_value=1, max_value=8))
@settings(deadline=None)
def test_balance_deals_every_index_once_in_equal_counts(lengths, num_ranks):
    parts = balance(lengths, num_ranks)
    assert len(parts) == num_ranks
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= (0 if len(lengths) % num_ranks == 0 else 1)
    assert all(part == sorted(part) for part in parts)


@given(LENGTHS, st.integers(min_value=1, max_value=8))
@settings(deadline=None)
def test_balance_is_within_one_sequence_of_even(lengths, num_ranks):
    # Every slice of the differencing method spreads by at most the longest sequence, and merging never adds spread.
    sums = tokens_of(balance(lengths, num_ranks), lengths)
    assert max(sums) - min(sums) <= max(lengths, default=0)


@given(LENGTHS.filter(bool), st.integers(min_value=1, max_value=9))
@settings(deadline=None)
def test_a_sequence_limit_is_kept_with_the_fewest_micro_batches(lengths, max_sequences):
    parts = micro_batches(lengths, max_sequences=max_sequences, max_tokens=None)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert len(parts) == -(-len(lengths) // max_sequences)
    assert all(1 <= len(part) <= max_sequences for part in parts)


@given(LENGTHS.filter(bool), st.integers(min_value=0, max_value=500), st.data())
@settings(deadline=None)
def test_a_token_budget_is_kept_and_no_micro_batch_is_empty(lengths, slack, data):
    budget = max(1, max(lengths) + slack)
    at_least = data.draw(st.integers(min_value=1, max_value=len(lengths)))
    parts = micro_batches(lengths, max_sequences=None, max_tokens=budget, at_least=at_least)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part and sum(lengths[index] for index in part) <= budget for part in parts)
    assert len(parts) >= at_least
    # Any two micro-batches beyond those asked for could not be one, or first fit would have merged them.
    fewest = max(1, -(-sum(lengths) // budget))
    assert len(parts) <= max(at_least, 2 * fewest)


@given(LENGTHS.filter(bool), st.integers(min_value=1, max_value=5))
@settings(deadline=None)
def test_packing_is_a_function_of_the_lengths(lengths, count):
    assert balance(list(lengths), count) == balance(tuple(lengths), count)
    budget = max(lengths) + count
    first = micro_batches(list(lengths), max_sequences=None, max_tokens=budget)
    assert first == micro_batches(tuple(lengths), max_sequences=None, max_tokens=budget)
