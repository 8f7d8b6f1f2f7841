import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.engines.builtin.sampler import Draw, draw, uniforms
from trainfer.exact.logprobs import row_sampling
from trainfer.types import SamplingParams

FIVE = [0.1, 0.4, 0.05, 0.25, 0.2]


def draw_at(probabilities: list[float], numbers: list[float], **sampling: float) -> Draw:
    params = SamplingParams(**{"max_new_tokens": 1, **sampling})  # type: ignore[arg-type]
    logits_BV = torch.tensor([probabilities] * len(numbers)).log()
    rows = row_sampling([params], [len(numbers)], device="cpu")
    return draw(logits_BV, torch.tensor(numbers, dtype=torch.float64), rows)


def test_a_draw_inverts_the_cumulative_distribution():
    # cumulative: 0.1, 0.5, 0.55, 0.8, 1.0
    drawn = draw_at(FIVE, [0.0, 0.09, 0.11, 0.49, 0.52, 0.7, 0.81, 1 - 2**-52])
    assert drawn.tokens_B.tolist() == [0, 0, 1, 1, 2, 3, 4, 4]
    assert drawn.logprobs_B.tolist() == pytest.approx([math.log(FIVE[t]) for t in drawn.tokens_B.tolist()])


def test_a_draw_among_the_survivors_reports_their_distribution():
    # top-k 2 leaves 0.4 and 0.25: cumulative 0.615, 1
    drawn = draw_at(FIVE, [0.0, 0.61, 0.62, 1 - 2**-52], top_k=2)
    assert drawn.tokens_B.tolist() == [1, 1, 3, 3]
    assert drawn.logprobs_B.tolist() == pytest.approx(
        [math.log(0.4 / 0.65)] * 2 + [math.log(0.25 / 0.65)] * 2
    )


def test_greedy_takes_the_likeliest_whatever_the_number():
    drawn = draw_at(FIVE, [0.0, 0.99], temperature=0.0, top_k=1)
    assert drawn.tokens_B.tolist() == [1, 1]
    assert drawn.logprobs_B.tolist() == pytest.approx([math.log(0.4)] * 2)


def test_greedy_and_random_rows_mix():
    params = [SamplingParams(max_new_tokens=1, temperature=0.0), SamplingParams(max_new_tokens=1)]
    logits_BV = torch.tensor([FIVE, FIVE]).log()
    numbers_B = torch.tensor([0.99, 0.99], dtype=torch.float64)
    drawn = draw(logits_BV, numbers_B, row_sampling(params, [1, 1], device="cpu"))
    assert drawn.tokens_B.tolist() == [1, 4]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), number=st.floats(0, 1 - 2**-52), top_k=st.sampled_from([-1, 1, 3, 40]))
def test_a_token_of_probability_zero_is_never_drawn_also_in_a_large_vocabulary(seed, number, top_k):
    for vocabulary in (50, 9001):
        logits_BV = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 30
        params = SamplingParams(max_new_tokens=1, top_k=top_k)
        numbers_B = torch.tensor([number], dtype=torch.float64)
        drawn = draw(logits_BV, numbers_B, row_sampling([params], [1], device="cpu"))
        assert math.isfinite(drawn.logprobs_B.item())
        if top_k != -1:
            assert (logits_BV > logits_BV[0, drawn.tokens_B]).sum() < top_k


def test_two_levels_find_the_token_of_one_running_sum():
    logits_BV = torch.randn(64, 20_000, generator=torch.Generator().manual_seed(0)) * 3
    numbers_B = torch.tensor(uniforms(1, 64), dtype=torch.float64)
    rows = row_sampling([SamplingParams(max_new_tokens=1)], [64], device="cpu")
    ends_BV = logits_BV.double().softmax(-1).cumsum(-1)
    expected_B = torch.searchsorted(ends_BV, numbers_B[:, None], right=True)[:, 0]
    assert torch.equal(draw(logits_BV, numbers_B, rows).tokens_B, expected_B)


def test_frequencies_match_probabilities():
    count = 40_000
    numbers = [uniforms(seed, 4)[place] for seed in range(count // 4) for place in range(4)]
    for sampling, expected in (
        ({}, FIVE),
        ({"temperature": 2.0}, [p**0.5 / sum(q**0.5 for q in FIVE) for p in FIVE]),
        ({"top_p": 0.7}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
    ):
        seen = draw_at(FIVE, numbers, **sampling).tokens_B.bincount(minlength=5).tolist()
        chi_square = sum((s - count * p) ** 2 / (count * p) for s, p in zip(seen, expected, strict=True) if p)
        assert chi_square < 18.5  # 4 degrees of freedom, 0.1 %
        assert all(s == 0 for s, p in zip(seen, expected, strict=True) if p == 0)


def test_uniforms_are_a_function_of_seed_and_place():
    assert uniforms(5, 10)[:3] == uniforms(5, 3)
    assert len({number for seed in range(100) for number in uniforms(seed, 100)}) == 10_000
    assert uniforms(-1, 2) == uniforms((1 << 64) - 1, 2)
    assert all(0 <= number < 1 for number in uniforms(7, 1000))


def test_uniforms_are_splitmix64_worked_in_plain_integers():
    mask = (1 << 64) - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    start = mix(12345)
    expected = [(mix((start + (i + 1) * 0x9E3779B97F4A7C15) & mask) >> 12) / 2**52 for i in range(4)]
    assert uniforms(12345, 4) == expected


def test_neighbouring_seeds_and_places_are_uncorrelated():
    table = torch.tensor([uniforms(seed, 64) for seed in range(2000)], dtype=torch.float64)
    assert abs(table.mean() - 0.5) < 0.004
    for one, two in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1]) < 0.012
