"""Models and requests of the GPU tests."""

import random
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from trainfer.exact.attention import ATTENTION_NAME
from trainfer.exact.linear import route_linears
from trainfer.exact.packed import pack
from trainfer.exact.routed import route_modules
from trainfer.exact.scores import forward_scores
from trainfer.integrations.transformers.load import tiny_model
from trainfer.integrations.transformers.register import register_attention
from trainfer.types import Completion, GenerationRequest, SamplingParams


def small_model(architecture: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Four layers whose down projection is long enough for the library to split its inner axis."""
    model = tiny_model(
        architecture, vocab_size=1000, hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=4, intermediate_size=3072,
    )  # fmt: skip
    with torch.no_grad():
        model.get_submodule("lm_head").get_parameter("weight").mul_(4)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.to(device="cuda", dtype=dtype)


def qwen3_06b() -> PreTrainedModel:
    """The shape of Qwen3-0.6B with a vocabulary of 32,000, random weights, head times three."""
    config = Qwen3Config(
        vocab_size=32000, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, intermediate_size=3072, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    register_attention()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    route_linears(model)
    route_modules(model)
    return model.eval()


def requests_of(
    count: int,
    *,
    vocabulary: int,
    prompt: tuple[int, int],
    new: tuple[int, int],
    group: int = 1,
    **sampling: float,
) -> list[GenerationRequest]:
    """``count`` prompts of random lengths, ``group`` requests each, with ranges of prompt and new tokens."""
    numbers = random.Random(count)
    requests: list[GenerationRequest] = []
    for p in range(count):
        ids = tuple(numbers.randrange(vocabulary) for _ in range(numbers.randint(*prompt)))
        for g in range(group):
            params = SamplingParams(max_new_tokens=numbers.randint(*new), **sampling)
            requests.append(
                GenerationRequest(request_id=f"{p}.{g}", prompt_ids=ids, seed=100 * p + g, sampling=params)
            )
    return requests


def sampled(completions: Sequence[Completion]) -> torch.Tensor:
    """Log-probs of all sampled tokens."""
    return torch.tensor([value for completion in completions for value in completion.logprobs])


def trained(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    completions: Sequence[Completion],
    micro_batch: int | None = None,
    *,
    share_prompts: bool = True,
) -> torch.Tensor:
    """The training forward's log-probs of the same tokens, in micro-batches of so many sequences; with autograd on."""
    pairs = list(zip(requests, completions, strict=True))
    size = micro_batch or len(pairs)
    parts: list[torch.Tensor] = []
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        batch = pack(
            [r.prompt_ids + c.token_ids for r, c in part],
            [len(r.prompt_ids) for r, _ in part],
            device="cuda",
            share_prompts=share_prompts,
        )
        temperatures = torch.cat(
            [torch.full((len(c.token_ids),), r.sampling.temperature) for r, c in part]
        ).cuda()
        parts.append(forward_scores(model, batch, temperatures)[0].detach().cpu())
    return torch.cat(parts)


def train_a_step(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], completions: Sequence[Completion]
) -> None:
    """One AdamW step that makes every other sequence likelier and the rest less likely."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = pack(
        [r.prompt_ids + c.token_ids for r, c in zip(requests, completions, strict=True)],
        [len(r.prompt_ids) for r in requests],
        device="cuda",
    )
    scores = forward_scores(model, batch, torch.ones(batch.num_scored, device="cuda"), entropy_gradient=True)
    signs = torch.cat(
        [torch.full((length,), 1.0 - 2 * (i % 2)) for i, length in enumerate(batch.response_lengths)]
    ).cuda()
    (-(scores[0] * signs).mean() - 0.01 * scores[1].mean()).backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    optimizer.step()
