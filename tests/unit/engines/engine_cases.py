"""Tiny models and requests that several engine tests use."""

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from trainfer.integrations.transformers.load import tiny_model
from trainfer.types import Completion, GenerationRequest, SamplingParams

ARCHITECTURES = ["qwen2", "qwen3", "llama", "gpt2"]


def peaked_model(architecture: str, **sizes: int) -> PreTrainedModel:
    """Random weights with a scaled head, so that log-probs are not all near -log V."""
    model = tiny_model(architecture, **sizes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2 if architecture == "gpt2" else 8)
    return model


def group_requests(
    num_prompts: int, per_group: int, sampling: SamplingParams, *, longest: int = 60, seed: int = 0
) -> list[GenerationRequest]:
    numbers = random.Random(seed)
    prompts = [
        tuple(numbers.randrange(5, 261) for _ in range(numbers.randrange(1, longest)))
        for _ in range(num_prompts)
    ]
    return [
        GenerationRequest(request_id=f"{p}.{g}", prompt_ids=ids, seed=1000 * p + g, sampling=sampling)
        for p, ids in enumerate(prompts)
        for g in range(per_group)
    ]


def assert_same(ours: Sequence[Completion], theirs: Sequence[Completion], *, bitwise: bool) -> None:
    """Same tokens; log-probs bit for bit where the CPU allows it, within 2e-5 elsewhere."""
    if bitwise:
        assert list(ours) == list(theirs)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert max(abs(a - b) for a, b in zip(one.logprobs, two.logprobs, strict=True)) <= 2e-5
