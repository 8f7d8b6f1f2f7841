"""Tiny models of ten architectures, random weights, nothing downloaded."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=8),
    "phi3": Phi3Config(**SHAPE),
    "olmo2": Olmo2Config(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8, sliding_window=8),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=8),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
}


def tiny(name: str, *, dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype, attn_implementation=attention)
    return model.eval()
