"""The order of prompts: every row once an epoch, the same wherever it is asked, ends told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.errors import DataError, RunFolderError
from trainfer.train.data.order import PromptOrder, permutation, steps_to_run, steps_total

# Case 42: 8 rows, 4 a step, 2 epochs.
CASE_42 = {"num_rows": 8, "prompts_per_step": 4}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("done", "left"), [(0, [1, 2, 3, 4]), (1, [2, 3, 4]), (2, [3, 4]), (3, [4])])
def test_case_42_resuming_runs_the_steps_that_are_left_in_the_same_order(shuffle, done, left):
    steps = steps_to_run(8, 4, total_epochs=2, total_training_steps=None, steps_done=done)
    assert list(steps) == left
    uninterrupted = PromptOrder(**CASE_42, shuffle=shuffle, seed=5)
    resumed = PromptOrder(**CASE_42, shuffle=shuffle, seed=5)
    whole_run = [uninterrupted.take(step) for step in (1, 2, 3, 4)]
    assert [resumed.take(step) for step in steps] == whole_run[done:]
    for epoch in (0, 1):
        assert sorted(whole_run[2 * epoch] + whole_run[2 * epoch + 1]) == list(range(8))


@pytest.mark.parametrize(
    ("epochs", "training_steps", "part"),
    [
        (
            2,
            None,
            r"4 steps are done and trainer\.total_epochs=2 of 2 steps each \(8 prompts, 4 a step\) allows 4",
        ),
        (9, 4, r"4 steps are done and trainer\.total_training_steps=4 allows 4"),
        (2, 50, r"trainer\.total_epochs=2"),
    ],
)
def test_case_42_no_step_left_is_an_error_that_says_why(epochs, training_steps, part):
    with pytest.raises(RunFolderError, match=part):
        steps_to_run(8, 4, total_epochs=epochs, total_training_steps=training_steps, steps_done=4)


@pytest.mark.parametrize(
    ("epochs", "training_steps", "total"), [(2, None, 4), (2, 3, 3), (2, 100, 4), (50, 7, 7), (1, 1, 1)]
)
def test_steps_end_with_the_epochs_or_before(epochs, training_steps, total):
    assert steps_total(8, 4, total_epochs=epochs, total_training_steps=training_steps) == total


def test_without_shuffle_the_file_order_repeats():
    order = PromptOrder(num_rows=8, prompts_per_step=3, shuffle=False)
    assert [order.take(step) for step in (1, 2, 3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert (order.steps_per_epoch, order.rows_left_out_per_epoch) == (2, 2)


def test_shuffled_epochs_differ_and_leave_out_different_rows():
    order = PromptOrder(num_rows=103, prompts_per_step=10, shuffle=True, seed=1)
    first, second = (
        [row for step in steps for row in order.take(step)] for steps in (range(1, 11), range(11, 21))
    )
    assert first != second
    assert set(range(103)) - set(first) != set(range(103)) - set(second)
    assert order.rows_left_out_per_epoch == 3


def test_the_permutation_is_pinned():
    """Numbers of Philox4x64-10 itself; a change would break every resumed run."""
    assert permutation(10, seed=0, epoch=0) == PINNED_0_0
    assert permutation(10, seed=2**64 - 1, epoch=3) == PINNED_MAX_3
    assert permutation(10, seed=-1, epoch=3) == PINNED_MAX_3


PINNED_0_0 = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
PINNED_MAX_3 = [3, 2, 8, 0, 1, 6, 9, 5, 4, 7]


def test_positions_are_evenly_spread():
    """Each of 5 rows comes first in a fifth of 5,000 epochs (5 standard deviations: 141)."""
    firsts = [permutation(5, seed=9, epoch=epoch)[0] for epoch in range(5000)]
    assert all(abs(firsts.count(row) - 1000) < 141 for row in range(5))


@pytest.mark.parametrize(("rows", "per_step"), [(3, 4), (0, 1), (0, 8)])
def test_too_few_rows_for_one_step_is_an_error(rows, per_step):
    with pytest.raises(DataError, match=rf"data\.train_batch_size={per_step}.*holds {rows}"):
        PromptOrder(num_rows=rows, prompts_per_step=per_step, shuffle=True)
    with pytest.raises(DataError, match="not even one step"):
        steps_total(rows, per_step, total_epochs=1, total_training_steps=None)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 2**64 - 1), st.booleans())
def test_an_epoch_holds_every_row_once_and_its_steps_are_its_front(num_rows, per_step, seed, shuffle):
    if per_step > num_rows:
        return
    order = PromptOrder(num_rows=num_rows, prompts_per_step=per_step, shuffle=shuffle, seed=seed)
    for epoch in (0, 1):
        rows = order.rows_of_epoch(epoch)
        assert sorted(rows) == list(range(num_rows))
        steps = range(epoch * order.steps_per_epoch + 1, (epoch + 1) * order.steps_per_epoch + 1)
        assert [row for step in steps for row in order.take(step)] == rows[: len(steps) * per_step]
        assert {order.epoch(step) for step in steps} == {epoch}
