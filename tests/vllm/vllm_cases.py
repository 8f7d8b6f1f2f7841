"""What several tests of the vllm engine need: folders, requests, the trainer's own log-probs."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainfer.engines.registry import make_engine
from trainfer.engines.vllm.settings import VllmSettings
from trainfer.exact.logprobs import filtered_logprobs, row_sampling
from trainfer.exact.packed import forward_logits, pack
from trainfer.integrations.transformers.load import load_model, save_model, tiny_model
from trainfer.types import Completion, GenerationRequest, SamplingParams

LONGEST = 160


def peaked_model(architecture: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, **sizes: int):
    """Random weights whose log-probs are not all near -log V. vLLM's CPU attention wants heads of at least 32."""
    model = tiny_model(architecture, num_heads=2, num_kv_heads=1, max_positions=256, **sizes)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    is_tied = tied or architecture == "gpt2"
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2 if is_tied else 8)
    return model.to(dtype)


def folder_of(model: PreTrainedModel, path: Path) -> Path:
    save_model(model, path)
    return path


def reload(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_model(folder, dtype=dtype, device="cpu")


def settings(folder: Path, **changes) -> VllmSettings:
    base = {"dtype": "float32", "device": "cpu", "max_sequence_tokens": LONGEST, "max_num_seqs": 64}
    return VllmSettings(model_folder=folder, **{**base, **changes})


def start(folder: Path, **changes):
    return make_engine("vllm", vllm=settings(folder, **changes))


def requests(num_prompts: int, per_group: int, sampling: SamplingParams) -> list[GenerationRequest]:
    numbers = random.Random(0)
    prompts = [
        tuple(numbers.randrange(5, 261) for _ in range(numbers.randrange(1, 60))) for _ in range(num_prompts)
    ]
    return [
        GenerationRequest(request_id=f"{p}.{g}", prompt_ids=ids, seed=2**63 + 1000 * p + g, sampling=sampling)
        for p, ids in enumerate(prompts)
        for g in range(per_group)
    ]


def gaps(
    model: PreTrainedModel, asked: Sequence[GenerationRequest], completions: Sequence[Completion]
) -> Tensor:
    """|log-prob of the engine - log-prob of the packed training pass|, one per sampled token."""
    sequences = [r.prompt_ids + c.token_ids for r, c in zip(asked, completions, strict=True)]
    batch = pack(sequences, [len(r.prompt_ids) for r in asked], device="cpu")
    rows = row_sampling([r.sampling for r in asked], batch.response_lengths, device="cpu")
    with torch.no_grad():
        trained = filtered_logprobs(forward_logits(model, batch), batch.targets_S, rows)
    sampled = torch.tensor([value for completion in completions for value in completion.logprobs])
    return (sampled - trained).abs()


def disturb(model: PreTrainedModel, *, seed: int, size: float = 0.02) -> None:
    """One optimizer step's stand-in: every parameter moves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((size * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))
