"""Edit scripts and lags of token ids."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.check.align.edits import MAX_MIDDLE, Edit, edit_script, lag

ids = st.lists(st.integers(0, 5), max_size=40)


def test_an_insertion_is_named_at_its_index():
    """Case 23: 8 stands before 93 on the second side."""
    engine = [5, 21, 22, 7, 90, 91, 92, 93, 7, 40, 41, 42]
    rescored = [5, 21, 22, 7, 90, 91, 92, 8, 93, 7, 40, 41, 42]
    assert edit_script(engine, rescored) == (
        Edit(kind="insert", first_start=7, first_stop=7, second_start=7, second_stop=8),
    )


def test_a_dropped_span_is_one_deletion():
    turn, prefix = [3, 10, 11, 4, 60, 61, 62, 61, 30, 31, 2], [3, 10, 11, 4, 30, 31, 2]
    edits = edit_script(turn, prefix)
    assert edits == (Edit(kind="delete", first_start=4, first_stop=8, second_start=4, second_stop=4),)


@given(ids, ids)
@settings(deadline=None)
def test_applying_the_script_gives_the_second_list(first: list[int], second: list[int]):
    result, done = [], 0
    for edit in edit_script(first, second):
        result += first[done : edit.first_start] + second[edit.second_start : edit.second_stop]
        done = edit.first_stop
    assert result + first[done:] == second


def test_a_very_long_difference_is_one_replacement():
    first, second = list(range(MAX_MIDDLE + 1)), list(range(MAX_MIDDLE + 1, 2 * MAX_MIDDLE + 2))
    assert len(edit_script(first, second)) == 1


def test_a_shift_by_one_is_a_lag():
    assert lag([1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 4, 5]) == 1
    assert lag([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 9]) == -1
    assert lag([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]) == 0
    assert lag([1, 2, 3, 4, 5, 6], [7, 7, 7, 7, 7, 7]) is None
