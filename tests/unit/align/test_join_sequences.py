"""Sequences are joined by ids, by index only where ids differ."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.check.align.sequences import join_sequences
from trainfer.check.dump.records import SequenceRecord


def record(tokens: list[int], index: int = 0) -> SequenceRecord:
    return SequenceRecord(
        index=index,
        tokens=tuple(tokens),
        prompt_length=1,
        logprobs=(0.0,) * (len(tokens) - 1),
        sampling={},
        weights_version=0,
        step=0,
        pass_name="decode",
    )


def test_order_does_not_matter_and_the_rest_goes_by_index():
    join = join_sequences([record([1, 2]), record([3, 4])], [record([3, 4]), record([1, 9])])
    assert [(p.rollout, p.train, p.equal) for p in join.pairs] == [(1, 0, True), (0, 1, False)]
    assert join.rollout_only == join.train_only == ()


def test_a_sequence_recorded_by_two_passes_joins_the_same_one():
    join = join_sequences([record([1, 2])], [record([1, 2]), record([1, 2])])
    assert [(p.rollout, p.train) for p in join.pairs] == [(0, 0), (0, 1)]


def test_duplicates_of_a_group_are_joined_one_to_one():
    join = join_sequences([record([1, 2]), record([1, 2])], [record([1, 2]), record([1, 2])])
    assert [(p.rollout, p.train) for p in join.pairs] == [(0, 0), (1, 1)]


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4), max_size=8), st.randoms())
@settings(deadline=None)
def test_a_shuffled_side_is_joined_whole(sequences: list[list[int]], random):
    shuffled = list(sequences)
    random.shuffle(shuffled)
    join = join_sequences([record(s) for s in sequences], [record(s) for s in shuffled])
    assert all(p.equal for p in join.pairs)
    assert sorted(p.rollout for p in join.pairs) == list(range(len(sequences)))
    assert sorted(p.train for p in join.pairs) == list(range(len(sequences)))
