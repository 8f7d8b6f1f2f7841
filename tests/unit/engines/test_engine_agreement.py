"""Engines against one another and against the training pass, on models of four architectures."""

import random
from collections.abc import Sequence

import pytest
import torch
from engine_cases import ARCHITECTURES, assert_same, group_requests, peaked_model
from torch import Tensor
from transformers import PreTrainedModel

from trainfer.engines.limits import EngineLimits
from trainfer.engines.registry import make_engine
from trainfer.exact.logprobs import filtered_logprobs, row_sampling
from trainfer.exact.packed import forward_logits, pack
from trainfer.types import Completion, FinishReason, GenerationRequest, SamplingParams


def training_logprobs(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], completions: Sequence[Completion]
) -> Tensor:
    sequences = [r.prompt_ids + c.token_ids for r, c in zip(requests, completions, strict=True)]
    batch = pack(sequences, [len(r.prompt_ids) for r in requests], device="cpu")
    rows = row_sampling([r.sampling for r in requests], batch.response_lengths, device="cpu")
    with torch.no_grad():
        return filtered_logprobs(forward_logits(model, batch), batch.targets_S, rows)


def engine_logprobs(completions: Sequence[Completion]) -> Tensor:
    return torch.tensor([value for completion in completions for value in completion.logprobs])


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_builtin_and_training_pass_agree_bit_for_bit_over_4000_tokens(architecture, share_prefixes, bitwise):
    model = peaked_model(architecture)
    requests = group_requests(15, 4, SamplingParams(max_new_tokens=70))
    engine = make_engine("builtin", model=model, limits=EngineLimits(share_prefixes=share_prefixes))
    completions = engine.generate(requests)
    ours, trained = engine_logprobs(completions), training_logprobs(model, requests, completions)
    assert ours.numel() >= 4000
    assert (ours - trained).abs().max() <= 2e-5
    assert torch.equal(ours, trained) or not bitwise


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hf_and_training_pass_agree_over_4000_tokens(architecture):
    model = peaked_model(architecture)
    requests = group_requests(15, 4, SamplingParams(max_new_tokens=70))
    completions = make_engine("hf", model=model).generate(requests)
    ours = engine_logprobs(completions)
    assert ours.numel() >= 4000
    assert (ours - training_logprobs(model, requests, completions)).abs().max() <= 2e-5


@pytest.mark.parametrize("name", ["builtin", "hf"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=30, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02),
        SamplingParams(max_new_tokens=30, temperature=1.3, top_p=0.5),
        SamplingParams(max_new_tokens=30, temperature=0.0),
    ],
    ids=["all filters", "top-p", "greedy"],
)
def test_logprobs_are_those_of_the_filtered_distribution(name, sampling):
    model = peaked_model("qwen3")
    requests = group_requests(6, 3, sampling)
    completions = make_engine(name, model=model).generate(requests)
    gap = (engine_logprobs(completions) - training_logprobs(model, requests, completions)).abs()
    assert gap.max() <= 2e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_of_builtin_are_those_of_hf(architecture):
    model = peaked_model(architecture)
    requests = group_requests(6, 1, SamplingParams(max_new_tokens=40, temperature=0.0, stop_token_ids=(7, 9)))
    ours = make_engine("builtin", model=model).generate(requests)
    theirs = make_engine("hf", model=model).generate(requests)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [c.finish_reason for c in ours] == [c.finish_reason for c in theirs]


LIMITS = [
    EngineLimits(max_num_seqs=1),
    EngineLimits(max_num_seqs=3),
    EngineLimits(block_size=1),
    EngineLimits(block_size=7, max_num_batched_tokens=50),
    EngineLimits(share_prefixes=False, max_num_batched_tokens=1),
    EngineLimits(cache_tokens=112, max_num_seqs=9),
    EngineLimits(cache_tokens=112, block_size=4, max_num_seqs=5),
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_tokens_and_logprobs_depend_on_the_seed_alone(limits, bitwise):
    model = peaked_model("qwen2")
    requests = group_requests(5, 4, SamplingParams(max_new_tokens=40, stop_token_ids=(7, 9)))
    expected = make_engine("builtin", model=model).generate(requests)
    shuffled = random.Random(1).sample(requests, len(requests))
    answers = make_engine("builtin", model=model, limits=limits).generate(shuffled)
    assert [c.request_id for c in answers] == [r.request_id for r in shuffled]
    by_name = {c.request_id: c for c in answers}
    assert_same([by_name[r.request_id] for r in requests], expected, bitwise=bitwise)


def test_a_tiny_cache_preempts_and_changes_nothing(bitwise):
    model = peaked_model("qwen3")
    requests = group_requests(4, 4, SamplingParams(max_new_tokens=40))
    engine = make_engine("builtin", model=model, limits=EngineLimits(cache_tokens=128))
    assert_same(
        engine.generate(requests), make_engine("builtin", model=model).generate(requests), bitwise=bitwise
    )
    assert engine.num_preemptions > 0  # type: ignore[attr-defined]


def test_hf_draws_by_seed_whatever_the_batch():
    model = peaked_model("qwen2")
    requests = group_requests(4, 3, SamplingParams(max_new_tokens=20, stop_token_ids=(7, 9)))
    expected = make_engine("hf", model=model).generate(requests)
    small = make_engine("hf", model=model, limits=EngineLimits(max_num_seqs=2)).generate(requests)
    assert [c.token_ids for c in small] == [c.token_ids for c in expected]


@pytest.mark.parametrize("name", ["builtin", "hf"])
def test_a_response_ends_with_its_stop_token_or_at_its_length(name):
    model = peaked_model("llama")
    stops = (7, 9, 30, 31)
    requests = group_requests(8, 4, SamplingParams(max_new_tokens=30, stop_token_ids=stops))
    for completion in make_engine(name, model=model).generate(requests):
        body, last = completion.token_ids[:-1], completion.token_ids[-1]
        assert not set(body) & set(stops)
        assert len(completion.logprobs) == len(completion.token_ids)
        if completion.finish_reason is FinishReason.STOP:
            assert last in stops
        else:
            assert last not in stops
            assert len(completion.token_ids) == 30


def test_long_sequences_cross_kernel_blocks_bit_for_bit(bitwise):
    model = peaked_model("qwen3", num_layers=1)
    lengths = (150, 190, 380, 500, 700)
    sampling = SamplingParams(max_new_tokens=60)
    numbers = random.Random(0)
    requests = [
        GenerationRequest(
            request_id=str(n),
            prompt_ids=tuple(numbers.randrange(5, 261) for _ in range(n)),
            seed=n,
            sampling=sampling,
        )
        for n in lengths
    ]
    completions = make_engine("builtin", model=model).generate(requests)
    ours, trained = engine_logprobs(completions), training_logprobs(model, requests, completions)
    assert (ours - trained).abs().max() <= 2e-5
    assert torch.equal(ours, trained) or not bitwise


def test_bfloat16_agrees_bit_for_bit_where_the_cpu_allows_it(bitwise):
    model = peaked_model("qwen2").to(torch.bfloat16)
    requests = group_requests(6, 3, SamplingParams(max_new_tokens=40))
    completions = make_engine("builtin", model=model).generate(requests)
    ours, trained = engine_logprobs(completions), training_logprobs(model, requests, completions)
    assert torch.equal(ours, trained) or not bitwise
