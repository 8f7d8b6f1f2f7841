"""Micro-batches that keep groups together."""

from hypothesis import given
from hypothesis import strategies as st

from trainfer.plan.packing import micro_batches, micro_batches_of_groups


def test_groups_lie_side_by_side_in_micro_batches_of_equal_size():
    groups = ["a", "b", "a", "b", "a", "b", "a", "b"]
    assert micro_batches_of_groups([5] * 8, groups, max_sequences=4, max_tokens=None) == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]


def test_a_group_is_cut_where_the_limit_asks_for_it():
    assert micro_batches_of_groups([5] * 5, [0] * 5, max_sequences=2, max_tokens=None) == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert micro_batches_of_groups([6, 6, 6, 6], [0, 1, 1, 0], max_sequences=None, max_tokens=12) == [
        [0, 3],
        [1, 2],
    ]


def test_keeping_together_never_costs_a_forward():
    lengths, groups = [7, 3, 3, 7], [0, 1, 0, 1]
    together = micro_batches_of_groups(lengths, groups, max_sequences=None, max_tokens=10)
    assert (
        together == micro_batches(lengths, max_sequences=None, max_tokens=10) == [[0, 1], [2, 3]]
        or len(together) == 2
    )


@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=30),
    limit=st.integers(1, 90),
    by_tokens=st.booleans(),
)
def test_every_sequence_comes_once_within_the_limit_in_as_many_forwards(rows, limit, by_tokens):
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    limits = (
        {"max_sequences": None, "max_tokens": max(30, limit)}
        if by_tokens
        else {"max_sequences": limit, "max_tokens": None}
    )
    parts = micro_batches_of_groups(lengths, groups, **limits)
    assert sorted(index for part in parts for index in part) == list(range(len(rows)))
    assert all(part for part in parts)
    assert len(parts) <= len(micro_batches(lengths, **limits))
    for part in parts:
        assert len(part) <= limit if not by_tokens else sum(lengths[i] for i in part) <= max(30, limit)
