import math

import pytest

from trainfer.train.update.schedule import LearningRate, mini_batches


def test_mini_batches_keep_the_order_without_a_seed():
    steps = mini_batches(4, mini_batch_sequences=2, epochs=2, shuffle_seed=None, update=3)
    assert steps == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_a_seed_draws_every_pass_anew_and_the_same_again():
    def draw(update, seed=1):
        return mini_batches(32, mini_batch_sequences=8, epochs=2, shuffle_seed=seed, update=update)

    steps = draw(0)
    for epoch in (steps[:4], steps[4:]):
        assert sorted(index for step in epoch for index in step) == list(range(32))
    assert steps[:4] != steps[4:]
    assert draw(0) == steps
    assert draw(1) != steps
    assert draw(0, seed=2) != steps


def test_the_shuffle_is_the_same_on_every_machine():
    assert mini_batches(6, mini_batch_sequences=6, epochs=1, shuffle_seed=42, update=0) == [
        [1, 2, 5, 4, 0, 3]
    ]


def test_warm_up_is_linear_from_zero_and_then_constant():
    rate = LearningRate(peak=1.0, warmup_updates=4)
    assert [rate.at(update) for update in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_cosine_falls_from_the_peak_to_the_floor():
    rate = LearningRate(peak=2.0, warmup_updates=2, cosine=True, total_updates=12, min_ratio=0.1)
    assert rate.at(2) == 2.0
    assert rate.at(7) == pytest.approx(1.1)
    assert rate.at(12) == pytest.approx(0.2)
    assert rate.at(4) == pytest.approx(2.0 * (0.55 + 0.45 * math.cos(math.pi * 0.2)))
