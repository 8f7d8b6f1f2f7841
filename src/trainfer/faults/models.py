"""Tiny Transformers models with random weights that make attention, norms and routers matter.

Takes an architecture's name, a seed and a dtype; gives a model in eval mode with eager attention.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 64
END = 63
PAD = 0
LAYERS = 2
WINDOW = 6
"""Sliding window of Gemma-2's first layer, short enough that most rows feel it."""
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": PAD,
    "eos_token_id": END, "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


def make_config(architecture: str) -> PretrainedConfig:
    """Sizes: 2 layers, width 32, 4 heads, 2 key/value heads, 64 tokens."""
    match architecture:
        case "qwen2":
            return Qwen2Config(**_SIZES)
        case "qwen2_tied":
            return Qwen2Config(**{**_SIZES, "tie_word_embeddings": True})
        case "qwen3":
            return Qwen3Config(**_SIZES, head_dim=8)
        case "llama":
            return LlamaConfig(**_SIZES)
        case "gemma2":
            return Gemma2Config(
                **_SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, attn_logit_softcapping=2.0,
                final_logit_softcapping=30.0,
            )  # fmt: skip
        case "mixtral":
            return MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)
        case "gpt2":
            return GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=256, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=PAD, eos_token_id=END, bos_token_id=None,
            )  # fmt: skip
    raise AssertionError(f"{architecture!r} is no architecture of the suite")


def make_model(architecture: str, *, seed: int, dtype: str = "float32") -> PreTrainedModel:
    """Random weights: matrices three times the usual size, so that neither attention nor logits are flat.

    Buffers stay in float32, as where a checkpoint is loaded.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            make_config(architecture), attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(3.0)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(DTYPES[dtype])
    return model


def module_of(model: nn.Module, name: str) -> Any:
    """A module by its dotted name; its attributes are its class's business."""
    return model.get_submodule(name)


def decoder(model: nn.Module) -> nn.Module:
    """The model without its head."""
    return model.get_submodule("transformer" if "transformer" in dict(model.named_children()) else "model")


def layer_name(model: nn.Module, layer: int) -> str:
    """``model.layers.1`` or ``transformer.h.1``."""
    return f"transformer.h.{layer}" if hasattr(model, "transformer") else f"model.layers.{layer}"


def attention_name(model: nn.Module, layer: int) -> str:
    """``model.layers.1.self_attn`` or ``transformer.h.1.attn``."""
    return f"{layer_name(model, layer)}.{'attn' if hasattr(model, 'transformer') else 'self_attn'}"
