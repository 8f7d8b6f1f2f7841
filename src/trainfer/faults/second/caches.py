"""Faults of the key/value cache: values in fewer bits, a prefix that outlives an update, blocks of another row.

Takes a pair; changes what the rollout's cache holds.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from trainfer.faults.fault import Fault
from trainfer.faults.models import attention_name
from trainfer.faults.pair import Pair
from trainfer.faults.records import Expected
from trainfer.faults.second.patch import moved, write

PREFIX = 3
PROMPT = 7
CHUNK = 5
SIZES = (0.3, 0.1, 0.01)
FIRST = ("model.layers.0.self_attn",)
Store = Callable[[Tensor], Tensor]


class StoringCache(DynamicCache):
    """A cache that changes keys and values as it stores them."""

    def __init__(self, model: PreTrainedModel, keys: Store, values: Store) -> None:
        super().__init__(config=model.config)
        self._keys, self._values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store, changed."""
        return super().update(self._keys(key_states), self._values(value_states), layer_idx, *args, **kwargs)


def through(dtype: torch.dtype) -> Store:
    """Rounded to a dtype and back."""
    return lambda states: states.to(dtype).to(states.dtype)


def plant_values(pair: Pair) -> list[Expected]:
    """Values in float8 with two bits of mantissa, keys as they are."""
    pair.rollout.make_cache = lambda model: StoringCache(model, lambda keys: keys, through(torch.float8_e5m2))
    return [Expected(cause="kv_cache.quantized", modules=FIRST)]


def plant_bfloat16(pair: Pair) -> list[Expected]:
    """A cache in bfloat16 under a model in float32."""
    store = through(torch.bfloat16)
    pair.rollout.make_cache = lambda model: StoringCache(model, store, store)
    return [Expected(cause="kv_cache.quantized", modules=FIRST)]


def _equal_prompts(pair: Pair) -> None:
    draw = random.Random(f"equal/{pair.seed}")
    pair.rollout.prompts = [[draw.randrange(1, 63) for _ in range(PROMPT)] for _ in range(4)]
    pair.rollout.prefix = PREFIX


def plant_not_reset(pair: Pair) -> list[Expected]:
    """The prefix cache of step 0 is still in use after the update before step 1."""
    _equal_prompts(pair)
    first = copy.deepcopy(pair.rollout_model)
    pair.rollout.prefix_models = [first] * 4
    pair.steps = 2
    new = moved(pair.clean, pair.size, pair.random())

    def update(pair: Pair, _: int) -> None:
        for model in (pair.clean, pair.train_model, pair.rollout_model):
            write(model, new)

    pair.between.append(update)
    return [
        Expected(cause="kv_cache.stale_prefix", modules=FIRST, tokens=lambda batch: batch.rows(start=PREFIX))
    ]


def plant_one_layer(pair: Pair) -> list[Expected]:
    """One layer's blocks were not flushed: their keys and values come from that layer's old matrices."""
    _equal_prompts(pair)
    module = attention_name(pair.clean, pair.case.layer)
    old = copy.deepcopy(pair.rollout_model)
    write(
        old,
        moved(
            old, pair.size, pair.random(),
            lambda name: name.startswith((f"{module}.k_proj", f"{module}.v_proj")),
        ),
    )  # fmt: skip
    pair.rollout.prefix_models = [old] * 4
    tokens = lambda batch: batch.rows(start=PREFIX)  # noqa: E731
    return [Expected(cause="kv_cache.stale_prefix", modules=(module,), tokens=tokens)]


def first_block_twice(cache: Cache, stop: int) -> None:
    """The longest prompt's last two entries before the first seam are its first two again, in every layer."""
    if stop != CHUNK:
        return
    assert isinstance(cache, DynamicCache)
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        for held in (layer.keys, layer.values):
            assert held is not None, "a chunk has been stored"
            held[-1, :, stop - 2 : stop] = held[-1, :, :2]


def plant_block_table(pair: Pair) -> list[Expected]:
    """The block table of one request names its first block twice, at a chunk's seam."""
    pair.rollout.chunk = CHUNK
    pair.rollout.after_chunk = first_block_twice
    return [
        Expected(
            cause="kv_cache.seam", modules=FIRST,
            tokens=lambda batch: batch.rows_of([len(batch.tokens) - 1], start=CHUNK),
        )
    ]  # fmt: skip


FAULTS = (
    Fault(
        name="kv_cache.quantized/values", plant=plant_values, sides=("rollout",),
        summary="values in float8 e5m2, keys as they are",
    ),
    Fault(
        name="kv_cache.quantized/bfloat16", plant=plant_bfloat16, sides=("rollout",), dtypes=("float32",),
        summary="a cache in bfloat16 under a model in float32",
    ),
    Fault(
        name="kv_cache.stale_prefix/not_reset", plant=plant_not_reset, sides=("rollout",), magnitudes=SIZES,
        summary="the prefix cache of step 0 is used in step 1, after an update (size: relative update)",
    ),
    Fault(
        name="kv_cache.stale_prefix/one_layer", plant=plant_one_layer, sides=("rollout",), magnitudes=SIZES,
        summary="one layer's prefix comes from its old key and value matrices (size: relative update)",
    ),
    Fault(
        name="kv_cache.seam/block_table", plant=plant_block_table, sides=("rollout",),
        summary="the two entries before a chunk's seam are the first two again, in one request",
    ),
)  # fmt: skip
