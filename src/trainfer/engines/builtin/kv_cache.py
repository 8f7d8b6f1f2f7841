"""Keys and values of past tokens: blocks that sequences share, and a contiguous window for the CPU kernel.

``PagedCache`` holds ``[blocks * block_size, G, K]`` per layer: what prefill computed. CPU attention wants the keys of
a sequence in one strided piece, so ``DecodeWindow`` keeps them so for the sequences that decode: a slot is filled from
the blocks once, and the keys of decoded tokens are written there alone. The two plans at the end are
what ``exact.attention`` calls in prefill and in decode.

Everything starts as zeros and stays finite: a masked key is multiplied by 0, and 0 * nan would be nan.

Axes: T rows, B slots, G key/value heads, L key length, K head size.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainfer.exact.attention import (
    AttentionForm,
    AttentionPlan,
    decode_attention,
    round_up,
    safe_key_length,
)
from trainfer.exact.layout import RowLayout
from trainfer.exact.packed import ROW_MULTIPLE, PackedPlan

WINDOW_STEP = 64
"""Key length of a window grows by at least this many tokens at a time."""


class PagedCache:
    """One pool of blocks per layer, allocated when the layer's first keys arrive.

    Args:
        num_blocks: Blocks that can be held; block 0 comes on top and is never read.
        block_size: Tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def layers(self) -> Sequence[int]:
        """Layers seen so far."""
        return tuple(self._keys)

    def rows_of(self, blocks: Sequence[int], first: int, last: int) -> list[int]:
        """Cache rows of positions ``first`` to ``last - 1`` of a sequence with these blocks."""
        size = self.block_size
        return [blocks[position // size] * size + position % size for position in range(first, last)]

    def write(self, layer: int, rows_T: Tensor, key_TGK: Tensor, value_TGK: Tensor) -> None:
        """Store keys and values; rows that stand for nobody go to block 0."""
        if layer not in self._keys:
            num_rows = (self.num_blocks + 1) * self.block_size
            self._keys[layer] = key_TGK.new_zeros(num_rows, *key_TGK.shape[1:])
            self._values[layer] = value_TGK.new_zeros(num_rows, *value_TGK.shape[1:])
        self._keys[layer].index_copy_(0, rows_T, key_TGK)
        self._values[layer].index_copy_(0, rows_T, value_TGK)

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """All rows of keys and of values of a layer that was written before, ``[rows, G, K]`` each."""
        return self._keys[layer], self._values[layer]

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of cache rows, ``[rows, G, K]`` each."""
        return self._keys[layer].index_select(0, rows), self._values[layer].index_select(0, rows)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in every layer; all sources are read before a target is written."""
        for pool in (*self._keys.values(), *self._values.values()):
            blocks = pool.unflatten(0, (-1, self.block_size))
            device = pool.device
            sources = torch.tensor([source for source, _ in copies], device=device)
            targets = torch.tensor([target for _, target in copies], device=device)
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))


class DecodeWindow:
    """Contiguous keys and values ``[B, L, G, K]`` per layer of the sequences that decode now."""

    def __init__(self, cache: PagedCache, num_slots: int, device: torch.device) -> None:
        self.num_slots = round_up(num_slots, ROW_MULTIPLE)
        self.capacity = 0
        self._cache = cache
        self._device = device
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def reserve(self, length: int) -> None:
        """Make room for ``length`` keys a slot and some more; what is there stays."""
        if length <= self.capacity:
            return
        capacity = safe_key_length(round_up(length + WINDOW_STEP, WINDOW_STEP))
        for pools in (self._keys, self._values):
            for layer, old in pools.items():
                grown = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
                grown[:, : self.capacity] = old
                pools[layer] = grown
        self.capacity = capacity

    def fill(self, slot: int, blocks: Sequence[int], length: int) -> None:
        """Copy the first ``length`` keys of a sequence into a slot."""
        rows = torch.tensor(self._cache.rows_of(blocks, 0, length), dtype=torch.int64, device=self._device)
        for layer in self._cache.layers:
            key, value = self._cache.read(layer, rows)
            keys, values = self.pools(layer, key, value)
            keys[slot, :length] = key
            values[slot, :length] = value

    def move(self, source: int, target: int) -> None:
        """Let the sequence of slot ``source`` take slot ``target``."""
        for pool in (*self._keys.values(), *self._values.values()):
            pool[target].copy_(pool[source])

    def pools(self, layer: int, key_TGK: Tensor, value_TGK: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's window, ``[B, L, G, K]`` each, allocated like the given keys at first sight."""
        if layer not in self._keys:
            self._keys[layer] = key_TGK.new_zeros(self.num_slots, self.capacity, *key_TGK.shape[1:])
            self._values[layer] = value_TGK.new_zeros(self.num_slots, self.capacity, *value_TGK.shape[1:])
        return self._keys[layer], self._values[layer]


class Decoding(Protocol):
    """A sequence while it decodes, by its tokens."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Its prompt."""
        ...

    @property
    def sampled_ids(self) -> Sequence[int]:
        """Sampled so far, the one that is decoded now included."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPlan:
    """Packed attention that also stores keys and values."""

    packed: AttentionPlan
    cache: PagedCache
    cache_rows_T: Tensor

    @property
    def layout(self) -> RowLayout | None:
        """Which rows are whose; only a probe asks. None where the packed plan cannot tell."""
        return self.packed.layout if isinstance(self.packed, PackedPlan) else None

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        """Attention output ``[T, H, K]``."""
        self.cache.write(form.layer, self.cache_rows_T, key_TGK, value_TGK)
        return self.packed.attend(query_THK, key_TGK, value_TGK, form)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """One row a slot, against the window. ``B`` counts idle slots too."""

    window: DecodeWindow
    window_rows_B: Tensor
    """``slot * capacity + position``."""
    positions_B: Tensor
    key_length: int
    masks: dict[int | None, Tensor]
    """Additive mask ``[B, key_length]`` by sliding window; filled as layers ask."""
    sequences: tuple[Decoding, ...] = ()
    """The sequence of each slot that is not idle."""

    def row_prefixes(self) -> list[tuple[Hashable, Sequence[int]] | None]:
        """For each row its sequence and all tokens up to the row; None for an idle one. Only a probe asks."""
        named: list[tuple[Hashable, Sequence[int]] | None] = [
            (sequence, (*sequence.prompt_ids, *sequence.sampled_ids)) for sequence in self.sequences
        ]
        return named + [None] * (len(self.window_rows_B) - len(named))

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        """Attention output ``[B, H, K]``."""
        keys, values = self.store(form.layer, key_TGK, value_TGK)
        return decode_attention(query_THK, keys, values, form, self.mask(form.window, query_THK.dtype))

    def store(self, layer: int, key_BGK: Tensor, value_BGK: Tensor) -> tuple[Tensor, Tensor]:
        """Write a row's key and value each; gives all of the step, ``[B, G, key_length, K]``."""
        keys, values = self.window.pools(layer, key_BGK, value_BGK)
        keys.flatten(0, 1).index_copy_(0, self.window_rows_B, key_BGK)
        values.flatten(0, 1).index_copy_(0, self.window_rows_B, value_BGK)
        rows = len(key_BGK)
        return (
            keys[:rows, : self.key_length].transpose(1, 2),
            values[:rows, : self.key_length].transpose(1, 2),
        )

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask ``[B, key_length]`` of a sliding window (None: all earlier keys are seen)."""
        if window not in self.masks:
            column = torch.arange(self.key_length, device=self.positions_B.device)
            seen = column <= self.positions_B[:, None]
            if window is not None:
                seen &= column > self.positions_B[:, None] - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self.masks[window] = mask.masked_fill_(~seen, float("-inf"))
        return self.masks[window]
