import math

import pytest
import torch
from torch import Tensor

from trainfer.exact.logprobs import (
    RowSampling,
    entropies,
    filtered_logprobs,
    kept_tokens,
    log_distribution,
    row_sampling,
    token_logprobs,
)
from trainfer.types import SamplingParams


def sampling(rows: int = 1, **filters: float) -> RowSampling:
    return row_sampling([SamplingParams(max_new_tokens=1, **filters)], [rows], device="cpu")  # type: ignore[arg-type]


def logits_of(probabilities: list[float]) -> Tensor:
    return torch.tensor([probabilities]).log()


def kept(probabilities: list[float], **filters: float) -> list[bool]:
    logprobs_SV = log_distribution(logits_of(probabilities), torch.ones(1))
    return kept_tokens(logprobs_SV, sampling(**filters))[0].tolist()


FIVE = [0.1, 0.4, 0.05, 0.25, 0.2]


def test_temperature_divides_the_logits():
    # exp(2 / 2) = e against exp(0) = 1
    value = token_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), torch.tensor([2.0]))
    assert value.item() == pytest.approx(1 - math.log(math.e + 1))


def test_temperature_zero_reports_temperature_one_without_filters():
    logits_SV = torch.tensor([[2.0, 0.0, -1.0]])
    greedy = filtered_logprobs(logits_SV, torch.tensor([1]), sampling(temperature=0.0, top_k=1))
    assert torch.equal(greedy, token_logprobs(logits_SV, torch.tensor([1]), torch.ones(1)))


def test_bfloat16_logits_are_normalised_in_float32():
    logits_SV = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets_S = torch.arange(4)
    value_S = token_logprobs(logits_SV, targets_S, torch.ones(4))
    assert value_S.dtype == torch.float32
    torch.testing.assert_close(value_S, logits_SV.double().log_softmax(-1)[range(4), targets_S].float())


def test_entropy_of_halves_is_log_two():
    value_S = entropies(torch.tensor([[0.0, 0.0, -1e9], [0.0, 0.0, 0.0]]), torch.ones(2))
    assert value_S.tolist() == pytest.approx([math.log(2), math.log(3)])


def test_top_k_keeps_the_likeliest():
    assert kept(FIVE, top_k=2) == [False, True, False, True, False]


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert kept(FIVE, top_k=50) == [True] * 5


def test_top_k_keeps_all_that_tie_with_the_kth():
    assert kept([0.2, 0.4, 0.2, 0.2], top_k=2) == [True] * 4


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.3, [False, True, False, False, False]),  # 0.4 alone reaches it
        (0.5, [False, True, False, True, False]),  # 0.4, then 0.25 begins below 0.5
        (0.64, [False, True, False, True, False]),  # 0.2 begins at 0.65
        (0.7, [False, True, False, True, True]),
        (0.97, [True] * 5),
        (1e-9, [False, True, False, False, False]),
    ],
)
def test_top_p_keeps_tokens_while_the_mass_before_them_is_below(top_p, expected):
    assert kept(FIVE, top_p=top_p) == expected


def test_top_p_keeps_ties_together():
    assert kept([0.25, 0.5, 0.25], top_p=0.6) == [True] * 3


def test_top_p_counts_mass_among_what_top_k_left():
    # of 0.4 and 0.25 the first has 0.615 of the mass, so top_p 0.6 stops there
    assert kept(FIVE, top_k=2, top_p=0.6) == [False, True, False, False, False]


def test_min_p_is_relative_to_the_likeliest():
    assert kept(FIVE, min_p=0.3) == [False, True, False, True, True]  # at least 0.12


def test_survivors_are_renormalised():
    value_S = filtered_logprobs(logits_of(FIVE), torch.tensor([3]), sampling(top_k=2))
    assert value_S.item() == pytest.approx(math.log(0.25 / 0.65))


def test_the_sampled_token_is_never_filtered_out():
    value_S = filtered_logprobs(logits_of(FIVE), torch.tensor([2]), sampling(top_k=2))
    assert value_S.item() == pytest.approx(math.log(0.05 / 0.70))


def test_rows_have_parameters_of_their_own():
    params = [
        SamplingParams(max_new_tokens=2, temperature=0.5),
        SamplingParams(max_new_tokens=1, top_k=1),
    ]
    rows = row_sampling(params, [2, 1], device="cpu")
    assert rows.temperatures_S.tolist() == [0.5, 0.5, 1.0]
    logits_SV = logits_of(FIVE).repeat(3, 1)
    value_S = filtered_logprobs(logits_SV, torch.tensor([1, 1, 1]), rows)
    squares = sum(p * p for p in FIVE)
    assert value_S.tolist() == pytest.approx([math.log(0.16 / squares)] * 2 + [0.0])


def test_no_filter_gives_the_same_bits_as_token_logprobs():
    logits_SV = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 4
    targets_S = torch.arange(6)
    params = [SamplingParams(max_new_tokens=1, temperature=0.7)] * 5 + [
        SamplingParams(max_new_tokens=1, top_k=3)
    ]
    rows = row_sampling(params, [1] * 6, device="cpu")
    filtered = filtered_logprobs(logits_SV, targets_S, rows)
    plain = token_logprobs(logits_SV, targets_S, rows.temperatures_S)
    assert torch.equal(filtered[:5], plain[:5])


def test_gradient_stays_finite_through_filters():
    logits_SV = logits_of(FIVE).requires_grad_()
    filtered_logprobs(logits_SV, torch.tensor([1]), sampling(top_k=2)).sum().backward()
    # d log(0.4 / 0.65): 1 - 0.615 for the token, -0.385 for its fellow, 0 for the filtered
    assert logits_SV.grad is not None
    assert logits_SV.grad[0].tolist() == pytest.approx([0, 0.25 / 0.65, 0, -0.25 / 0.65, 0], abs=1e-6)
