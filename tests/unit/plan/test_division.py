"""Every sequence on one rank, equally many forwards on all of them, no limit broken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.errors import PlanError
from trainfer.plan.division import deal, equal_forwards


def test_neighbours_stay_together_where_nothing_is_balanced():
    assert deal([9, 1, 1, 1, 1], 2, balanced=False) == [[0, 1, 2], [3, 4]]
    assert deal([1], 3, balanced=False) == [[0], [], []]


def test_whole_groups_go_to_a_rank_and_tokens_are_even():
    # groups of 2 with 18, 4, 12 and 10 tokens: 18 + 4 against 12 + 10
    lengths, groups = [9, 9, 2, 2, 6, 6, 5, 5], "aabbccdd"
    assert deal(lengths, 2, balanced=True, groups=groups) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_groups_that_ranks_cannot_have_equally_many_of_are_cut():
    dealt = deal([5] * 6, 2, balanced=True, groups="aabbcc")
    assert [len(indices) for indices in dealt] == [3, 3]


def test_a_rank_that_needs_fewer_forwards_cuts_its_largest():
    forwards = equal_forwards([[8, 8, 8, 8], [2, 2, 2, 2]], max_sequences=None, max_tokens=8)
    assert forwards == [[[0], [1], [2], [3]], [[0], [1], [2], [3]]]


def test_a_rank_with_too_few_sequences_makes_empty_forwards():
    forwards = equal_forwards([[8, 8, 8], [8], []], max_sequences=1, max_tokens=None)
    assert forwards == [[[0], [1], [2]], [[0], [], []], [[], [], []]]


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(PlanError, match="9 tokens"):
        equal_forwards([[1], [9]], max_sequences=None, max_tokens=8)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=24),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(40, 90)),
)
def test_every_division_is_whole_and_even(lengths, num_ranks, balanced, group_size, max_tokens):
    groups = [index // group_size for index in range(len(lengths))]
    dealt = deal(lengths, num_ranks, balanced=balanced, groups=groups)
    assert sorted(index for indices in dealt for index in indices) == list(range(len(lengths)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    max_sequences = 3 if max_tokens is None else None
    forwards = equal_forwards(
        [[lengths[index] for index in indices] for indices in dealt],
        max_sequences=max_sequences,
        max_tokens=max_tokens,
        groups_by_rank=[[groups[index] for index in indices] for indices in dealt],
    )
    assert len({len(parts) for parts in forwards}) == 1
    for indices, parts in zip(dealt, forwards, strict=True):
        assert sorted(index for part in parts for index in part) == list(range(len(indices)))
        for part in parts:
            assert len(part) <= (max_sequences or len(part))
            assert sum(lengths[indices[index]] for index in part) <= (max_tokens or 10**9)
