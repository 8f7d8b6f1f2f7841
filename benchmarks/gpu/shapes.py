"""The model, the requests and the limits of the chip that the GPU benchmarks share."""

import random

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from trainfer.exact.attention import ATTENTION_NAME
from trainfer.exact.linear import route_linears
from trainfer.exact.routed import route_modules
from trainfer.integrations.transformers.register import register_attention
from trainfer.types import GenerationRequest, SamplingParams

PEAK_FLOPS = 790e12
"""bf16 matrix product of 8192 cubed on an H200, measured."""
VOCABULARY = 32000


def qwen3_06b(*, attention: str = ATTENTION_NAME, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The shape of Qwen3-0.6B with a vocabulary of 32,000, random weights, head times three."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, intermediate_size=3072, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    return _build(config, attention, dtype)


def smollm2_135m(*, attention: str = ATTENTION_NAME, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The shape of SmolLM2-135M: 30 layers, width 576, 9 and 3 heads of 64, head tied to the embedding."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, max_position_embeddings=8192, tie_word_embeddings=True, rope_theta=100000,
    )  # fmt: skip
    return _build(config, attention, dtype)


def _build(config: PretrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    register_attention()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    if attention == ATTENTION_NAME:
        route_linears(model)
        route_modules(model)
    return model.eval()


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that a token is multiplied with."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def requests_of(count: int, *, prompt: int, new: int) -> list[GenerationRequest]:
    """Random prompts of one length; no stop token."""
    numbers = random.Random(prompt)
    sampling = SamplingParams(max_new_tokens=new)
    return [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=tuple(numbers.randrange(VOCABULARY) for _ in range(prompt)),
            seed=i,
            sampling=sampling,
        )
        for i in range(count)
    ]


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 5 * 2 * source.numel() * 4 / (start.elapsed_time(end) / 1000)
