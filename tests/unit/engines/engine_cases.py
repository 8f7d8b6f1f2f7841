"""Tiny models and requests that several engine tests use."""

import functools
import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
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


@functools.cache
def cpu_keeps_the_rules() -> bool:
    """True where this CPU's library sums a row in one order at all the shapes that exact.attention chooses."""
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((64, 64), (64, 192), (192, 64), (64, 261)):
        rows, weight = (
            torch.randn(512, inputs, generator=generator),
            torch.randn(outputs, inputs, generator=generator),
        )
        full = F.linear(rows, weight)
        if not all(torch.equal(F.linear(rows[:n], weight), full[:n]) for n in range(8, 200, 8)):
            return False
    query, key, value = (torch.randn(1, 4, 512, 16, generator=generator) for _ in range(3))
    full = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    for length in (*range(16, 193, 16), 384, 400, 496):
        part = F.scaled_dot_product_attention(
            query[:, :, :length], key[:, :, :length], value[:, :, :length], is_causal=True
        )
        if not torch.equal(part, full[:, :, :length]):
            return False
    return True


def assert_same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    """Same tokens; log-probs bit for bit where the CPU allows it, within 2e-5 elsewhere."""
    if cpu_keeps_the_rules():
        assert list(ours) == list(theirs)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert max(abs(a - b) for a, b in zip(one.logprobs, two.logprobs, strict=True)) <= 2e-5
