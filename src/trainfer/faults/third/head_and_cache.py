"""Faults of the head, of the key/value cache, and of the way from logits to recorded log-probs.

Takes a pair; changes how a side stores keys and values, makes logits, or reads log-probs from them.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache

from trainfer.faults.pair import Pair
from trainfer.faults.records import Batch, Expected
from trainfer.faults.second.patch import moved, replace_forward, write
from trainfer.faults.sides import log_softmax
from trainfer.faults.third.describe import described

FIRST_ATTENTION = ("model.layers.0.self_attn",)


def _head_bf16(pair: Pair) -> Sequence[Expected]:
    """The head multiplies in bfloat16 beside a model in float32."""
    head = pair.find("lm_head")
    replace_forward(
        head, lambda _, x: functional.linear(x.bfloat16(), head.weight.bfloat16()).to(head.weight.dtype)
    )
    return [Expected(cause="head.dtype", modules=("lm_head",))]


def _padding_scored(pair: Pair) -> Sequence[Expected]:
    """Eight columns that pad the vocabulary stay in the softmax, with logits of zero."""
    replace_forward(pair.find("lm_head"), lambda old, x: functional.pad(old(x), (0, 8)))
    return [Expected(cause="head.padded_vocab", modules=("lm_head",))]


def _half_old_prefix(pair: Pair) -> Sequence[Expected]:
    """Every other prompt hits blocks that were filled before an update."""
    draw = torch.Generator().manual_seed(4100 + pair.seed)
    length, hit = 8, 5
    pair.rollout.prompts = [
        torch.randint(1, 63, (length,), generator=draw).tolist() for _ in pair.rollout.prompts
    ]
    old, own = copy.deepcopy(pair.rollout_model), copy.deepcopy(pair.rollout_model)
    write(old, moved(old, 0.2, pair.random()))
    pair.rollout.prefix = hit
    pair.rollout.prefix_models = [old if s % 2 else own for s in range(len(pair.rollout.prompts))]
    return [
        Expected(
            cause="kv_cache.stale_prefix",
            modules=FIRST_ATTENTION,
            tokens=lambda batch: batch.rows_of(range(1, len(batch.tokens), 2), start=hit),
        )
    ]


class FewLevels(DynamicCache):
    """Values are stored with few levels, one scale for each token and head."""

    levels: int = 7

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any) -> Any:
        """Round new values before they are stored."""
        scale = value_states.abs().amax(-1, keepdim=True).clamp(min=1e-6) / self.levels
        return super().update(key_states, (value_states / scale).round() * scale, *args, **more)


def _few_levels(pair: Pair) -> Sequence[Expected]:
    """Values are stored in three or four bits, keys as they are."""

    def make_cache(model: Any) -> Cache:
        cache = FewLevels(config=model.config)
        cache.levels = int(pair.size)
        return cache

    pair.rollout.make_cache = make_cache
    return [Expected(cause="kv_cache.quantized", modules=FIRST_ATTENTION)]


def _seam_repeats(pair: Pair) -> Sequence[Expected]:
    """The last slot of a prefill chunk holds what the slot before it holds: written one place early."""

    def after(cache: Any, stop: int) -> None:
        for layer in cache.layers:
            layer.keys[:, :, stop - 1] = layer.keys[:, :, stop - 2]
            layer.values[:, :, stop - 1] = layer.values[:, :, stop - 2]

    pair.rollout.chunk = max(map(len, pair.rollout.prompts)) - 1
    pair.rollout.after_chunk = after

    return [Expected(cause="kv_cache.seam", modules=FIRST_ATTENTION, tokens=_prompt_ends)]


def _prompt_ends(batch: Batch) -> set[tuple[int, int]]:
    """Rows from the last prompt token on."""
    return {
        (s, p)
        for s, (tokens, length) in enumerate(zip(batch.tokens, batch.prompt_lengths, strict=True))
        for p in range(length - 1, len(tokens) - 1)
    }


def _declare(pair: Pair, temperature: float) -> None:
    """Both sides say that their log-probs are at a temperature."""
    pair.rollout.temperature = temperature
    pair.rollout.declared = {"temperature": temperature}
    pair.train.declared = {"temperature": temperature}


def _raw(pair: Pair) -> Sequence[Expected]:
    """One side records log-probs at temperature 1 and says another."""
    _declare(pair, pair.size)
    pair.read[pair.case.side] = log_softmax(1.0)
    return [Expected(cause="logprob.temperature", tokens=Batch.responses)]


def _kept_only(pair: Pair) -> Sequence[Expected]:
    """The engine renormalises over what the nucleus keeps, and does not say so."""
    pair.rollout.top_p = pair.size
    pair.read["rollout"] = log_softmax(1.0, top_p=pair.size)
    return [Expected(cause="logprob.filtered")]


def _divided_after(pair: Pair) -> Sequence[Expected]:
    """Log-probs, not logits, are divided by the temperature."""
    _declare(pair, pair.size)
    whole = log_softmax(1.0)
    pair.read[pair.case.side] = lambda logits_V, token: whole(logits_V, token) / pair.size
    return [Expected(cause="logprob.scaled_after_softmax", tokens=Batch.responses)]


def _loss_in_bf16(pair: Pair) -> Sequence[Expected]:
    """A fused loss takes the log-softmax in bfloat16."""
    pair.read[pair.case.side] = lambda logits_V, token: float(logits_V.bfloat16().log_softmax(-1)[token])
    return [Expected(cause="logprob.path")]


_FP32 = ("float32",)
FAULTS = (
    described("head.dtype/product_bf16", _head_bf16, dtypes=_FP32),
    described("head.padded_vocab/zeros_scored", _padding_scored),
    described("kv_cache.stale_prefix/every_other_prompt", _half_old_prefix, sides=("rollout",)),
    described("kv_cache.quantized/few_value_levels", _few_levels, sides=("rollout",), magnitudes=(3.0, 7.0)),
    described("kv_cache.seam/slot_repeated", _seam_repeats, sides=("rollout",)),
    described("logprob.temperature/says_another", _raw, magnitudes=(0.6, 1.3)),
    described("logprob.filtered/nucleus_unsaid", _kept_only, sides=("rollout",), magnitudes=(0.5, 0.8)),
    described("logprob.scaled_after_softmax/divided_after", _divided_after, magnitudes=(0.7, 1.4)),
    described("logprob.path/log_softmax_bf16", _loss_in_bf16, dtypes=_FP32),
)
