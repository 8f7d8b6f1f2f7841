"""Rows are joined by key; every row whose key the other side has takes part."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.check.align.rows import NO_ROW, LabelledTable, join_rows, repeated_rows


def table(keys: list[int], labels: list[int] | None = None) -> LabelledTable:
    return LabelledTable(
        keys=np.array(keys, dtype=np.int64),
        labels=np.array(labels or [0] * len(keys), dtype=np.int64),
        positions=np.arange(len(keys)),
        tokens=np.zeros(len(keys), dtype=np.int64),
        pass_name="decode",
    )


def pairs(blocks, rollout, train) -> set[tuple[int, int, int, int]]:
    return {
        (block.rollout, int(a), block.train, int(b))
        for block in blocks
        for a, b in zip(block.rollout_slots, block.train_slots, strict=True)
    }


def test_padding_never_takes_part():
    blocks = join_rows([table([NO_ROW, 7, 8])], [table([8, NO_ROW, 7, NO_ROW])])
    assert pairs(blocks, 0, 0) == {(0, 1, 0, 2), (0, 2, 0, 0)}


def test_rows_of_the_same_sequence_are_preferred():
    """Two samples of one prompt: key 5 stands in both, each with its own."""
    rollout, train = [table([5, 5], [0, 1])], [table([5, 5], [1, 0])]
    assert pairs(join_rows(rollout, train), 0, 0) == {(0, 0, 0, 1), (0, 1, 0, 0)}


def test_a_prompt_computed_once_serves_all_its_samples():
    rollout, train = [table([5], [0])], [table([5, 5, 5], [0, 1, 2])]
    assert pairs(join_rows(rollout, train), 0, 0) == {(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)}


def test_decode_calls_are_joined_to_one_training_call():
    rollout, train = [table([1]), table([2]), table([3])], [table([1, 2, 3])]
    assert pairs(join_rows(rollout, train), 0, 0) == {(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 0, 2)}


keys = st.lists(st.integers(-1, 6), max_size=8)


@given(st.lists(keys, max_size=4), st.lists(keys, max_size=4))
@settings(deadline=None, max_examples=300)
def test_every_common_key_is_covered_on_both_sides_and_pairs_have_equal_keys(left, right):
    rollout, train = [table(item) for item in left], [table(item) for item in right]
    found = pairs(join_rows(rollout, train), rollout, train)
    for a, slot_a, b, slot_b in found:
        assert rollout[a].keys[slot_a] == train[b].keys[slot_b] != NO_ROW
    for mine, other, place in ((left, right, 0), (right, left, 2)):
        common = {key for item in other for key in item if key != NO_ROW}
        wanted = {(i, j) for i, item in enumerate(mine) for j, key in enumerate(item) if key in common}
        assert {(pair[place], pair[place + 1]) for pair in found} == wanted


def test_repeated_rows_meet_the_first_of_their_key():
    blocks = repeated_rows([table([1, 2, 1]), table([2, 3])])
    assert pairs(blocks, 0, 0) == {(0, 0, 0, 2), (0, 1, 1, 0)}
    assert repeated_rows([table([1, 2, 3])]) == []
