"""Tiny models with random weights and a byte tokenizer, made on the spot: the demo's and the tests'.

Takes sizes; gives real Transformers objects which ``save_model`` writes and the Auto classes load.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from trainfer.errors import ModelError
from trainfer.exact.attention import ATTENTION_NAME
from trainfer.exact.linear import route_linears
from trainfer.exact.routed import route_modules
from trainfer.integrations.transformers.register import register_attention

ARCHITECTURES = ("qwen2", "qwen3", "llama", "gpt2")
PAD_TOKEN = "<|endoftext|>"
"""Qwen's tokenizer class, which AutoTokenizer picks for Qwen2 folders, adds this token if it is not there."""
END_TOKEN = "<|end|>"
SPECIAL_TOKENS = (PAD_TOKEN, END_TOKEN, "<|system|>", "<|user|>", "<|assistant|>")
BYTE_VOCABULARY = len(SPECIAL_TOKENS) + 256
"""Ids 0 to 4 are the special tokens in their order, then the 256 bytes in ByteLevel's alphabet."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_model(
    architecture: str,
    *,
    vocab_size: int = BYTE_VOCABULARY,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 192,
    max_positions: int = 2048,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A causal LM with random weights drawn from ``seed``, in eval mode, attention set to trainfer's.

    Args:
        architecture: One of ``ARCHITECTURES``; gpt2 has as many key/value heads as heads.
        vocab_size: V.
        hidden_size: D.
        num_layers: L.
        num_heads: H.
        num_kv_heads: Key/value heads; ignored by gpt2, which has H.
        intermediate_size: Width of the MLP.
        max_positions: Longest sequence.
        seed: The caller's random state is left as it was.
        dtype: Of the parameters.

    Raises:
        ModelError: Unknown architecture.
    """
    config = _config(
        architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_positions=max_positions,
    )
    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    route_linears(model)
    route_modules(model)
    return model.eval()


def _config(
    architecture: str,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    max_positions: int,
) -> PretrainedConfig:
    if architecture == "gpt2":
        return GPT2Config(
            vocab_size=vocab_size, n_embd=hidden_size, n_layer=num_layers, n_head=num_heads, n_inner=intermediate_size,
            n_positions=max_positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )  # fmt: skip
    classes = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    if architecture not in classes:
        raise ModelError(
            f"{architecture!r}: no tiny model of this architecture; one of {', '.join(ARCHITECTURES)}"
        )
    config = classes[architecture](
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=num_layers, num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads, intermediate_size=intermediate_size, max_position_embeddings=max_positions,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    if isinstance(config, Qwen3Config):
        config.head_dim = hidden_size // num_heads
    return config


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per UTF-8 byte, special tokens for chat roles, pad and end; no merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        model_max_length=1 << 20,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
