"""kv_cache.*: what the rollout's cache holds is not what was computed."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from trainfer.faults.fault import Fault
from trainfer.faults.models import LAYERS, attention_name
from trainfer.faults.pair import Pair
from trainfer.faults.plants.weights import update
from trainfer.faults.records import Batch, Expected, Token

_ALL = ("qwen2", "qwen3", "llama", "gpt2")
HIT = 4
"""Tokens of a prompt that the prefix cache supplies."""


def plant_stale_prefix(pair: Pair) -> Sequence[Expected]:
    """Keys and values of some prompts' first tokens were computed before the last update."""
    old = copy.deepcopy(pair.clean)
    update(old, pair.size, pair.random())
    longest = pair.rollout.prompts[3]
    prompts = [
        [token % 60 + 1 for token in range(11 * (row + pair.seed), 11 * (row + pair.seed) + 7)]
        for row in range(3)
    ]
    pair.rollout.prompts = [prompts[0], list(prompts[0]), prompts[1], longest[:7]]
    pair.rollout.prefix = HIT
    pair.rollout.prefix_models = [old, old, old, pair.clean]
    name = attention_name(pair.clean, 0)

    def rows(batch: Batch) -> set[Token]:
        return batch.rows_of([0, 1, 2], start=HIT)

    return [Expected(cause="kv_cache.stale_prefix", modules=(name,), tokens=rows)]


@dataclass(frozen=True, slots=True)
class Rounded:
    """Makes caches whose entries are rounded as they are written."""

    dtype: torch.dtype
    only: int | None
    """The layer; None for all."""

    def __call__(self, model: PreTrainedModel) -> Cache:
        """A cache for one batch."""
        cache = DynamicCache(config=model.config)
        write = cache.update

        def rounded(
            keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
        ) -> tuple[Tensor, Tensor]:
            if self.only in (None, layer):
                keys, values = self.round(keys), self.round(values)
            return write(keys, values, layer, *args, **kwargs)

        cache.__dict__["update"] = rounded
        return cache

    def round(self, x: Tensor) -> Tensor:
        """To the cache's grid and back; int8 with one scale per head and row."""
        if self.dtype is torch.int8:
            scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
            return ((x / scale).round().clamp(-127, 127) * scale).to(x.dtype)
        return x.to(self.dtype).to(x.dtype)


def plant_fp8(pair: Pair) -> Sequence[Expected]:
    """The cache is kept in float8 (e4m3) in all layers."""
    pair.rollout.make_cache = Rounded(torch.float8_e4m3fn, None)
    return [Expected(cause="kv_cache.quantized", modules=(attention_name(pair.clean, 0),))]


def plant_int8(pair: Pair) -> Sequence[Expected]:
    """The cache is kept in int8 in one layer."""
    pair.rollout.make_cache = Rounded(torch.int8, pair.case.layer)
    return [Expected(cause="kv_cache.quantized", modules=(attention_name(pair.clean, pair.case.layer),))]


def plant_seam(pair: Pair) -> Sequence[Expected]:
    """Between two chunks of prefill the last entry before the seam is lost: a block table off by one."""
    pair.rollout.chunk = 5
    lost: list[int] = []

    def forget(cache: Any, slots: int) -> None:
        if not lost or lost[0] == slots:
            lost[:] = [slots]
            for layer in range(LAYERS):
                cache.layers[layer].keys[:, :, slots - 1] = 0
                cache.layers[layer].values[:, :, slots - 1] = 0

    pair.rollout.after_chunk = forget

    def rows(batch: Batch) -> set[Token]:
        longest = max(batch.prompt_lengths)
        behind = [(s, longest - length) for s, length in enumerate(batch.prompt_lengths)]
        reached = {s: 5 - pad for s, pad in behind if pad < 5}
        return {(s, p) for s, p in batch.rows() if s in reached and p >= reached[s]}

    return [Expected(cause="kv_cache.seam", modules=(attention_name(pair.clean, 0),), tokens=rows)]


def plant_shifted_block(pair: Pair) -> Sequence[Expected]:
    """At the seam one layer's entries move by one slot: a chunk was written one place too late."""
    pair.rollout.chunk = 5
    layer = pair.case.layer
    done: list[int] = []

    def shift(cache: Any, slots: int) -> None:
        if not done:
            done.append(slots)
            for tensor in (cache.layers[layer].keys, cache.layers[layer].values):
                tensor[:, :, 3:slots] = tensor[:, :, 2 : slots - 1].clone()

    pair.rollout.after_chunk = shift

    def rows(batch: Batch) -> set[Token]:
        longest = max(batch.prompt_lengths)
        pads = [longest - length for length in batch.prompt_lengths]
        return {(s, p) for s, p in batch.rows() if pads[s] < 5 and p >= 5 - pads[s]}

    return [Expected(cause="kv_cache.seam", modules=(attention_name(pair.clean, layer),), tokens=rows)]


_ROLLOUT = ("rollout",)
FAULTS = (
    Fault(
        name="kv_cache.stale_prefix/hits", plant=plant_stale_prefix, sides=_ROLLOUT, architectures=_ALL,
        magnitudes=(1e-1, 1e-2, 1e-3, 1e-4, 1e-6),
        summary="three of four prompts take four tokens from a cache older than the update (size: relative update)",
    ),
    Fault(
        name="kv_cache.quantized/fp8", plant=plant_fp8, sides=_ROLLOUT, architectures=_ALL, summary="a cache in float8 e4m3"
    ),
    Fault(
        name="kv_cache.quantized/int8", plant=plant_int8, sides=_ROLLOUT, architectures=_ALL,
        summary="one layer's cache in int8",
    ),
    Fault(
        name="kv_cache.seam/lost", plant=plant_seam, sides=_ROLLOUT, architectures=_ALL,
        summary="the last entry before a chunk's seam is lost",
    ),
    Fault(
        name="kv_cache.seam/shifted", plant=plant_shifted_block, sides=_ROLLOUT, architectures=_ALL,
        summary="one layer's entries before the seam stand one slot too late",
    ),
)  # fmt: skip
