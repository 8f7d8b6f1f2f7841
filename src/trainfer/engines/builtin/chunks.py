"""Prefill of one long prompt in several forwards, with the bits that a single one would give.

Takes a prompt's tokens and its cache rows; gives the inputs and the attention plan of each forward. The rows of a chunk
attend to the keys of all chunks before it, which they read back from the cache. Chunks begin at multiples of
``QUERY_MULTIPLE``: query rows then lie in the same blocks, with the same numbers of keys, as in one forward.

Axes: T rows of one chunk, L query rows, G key/value heads, H query heads, K head size.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from trainfer.engines.builtin.kv_cache import PagedCache
from trainfer.exact.attention import (
    QUERY_MULTIPLE,
    AttentionForm,
    QueryChunk,
    causal_attention,
    query_chunks,
    round_up,
)
from trainfer.exact.packed import ROW_MULTIPLE


def chunk_tokens(max_num_batched_tokens: int) -> int:
    """Tokens of a whole chunk: as many as a forward may hold, in whole blocks of query rows, and at least one block."""
    return max(QUERY_MULTIPLE, max_num_batched_tokens // QUERY_MULTIPLE * QUERY_MULTIPLE)


class Prefix(Sequence[int]):
    """The first tokens of a sequence, without a copy of them."""

    def __init__(self, token_ids: Sequence[int], length: int) -> None:
        self._token_ids = token_ids
        self._length = length

    def __len__(self) -> int:
        """Tokens."""
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        """As of a tuple."""
        if isinstance(place, slice):
            return [self._token_ids[index] for index in range(*place.indices(self._length))]
        return self._token_ids[range(self._length)[place]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """Attention of rows ``first`` to ``last - 1`` of one sequence against the cache."""

    cache: PagedCache
    cache_rows_T: Tensor
    """Where the rows' keys and values go; block 0 for dummies."""
    key_rows: Tensor
    """Cache rows of positions 0 on, as many as the last query row needs; beyond the chunk's end its last position."""
    query_rows_L: Tensor
    """Row of each query; beyond the chunk's end its last row, whose result is dropped."""
    output_rows_T: Tensor
    chunks: tuple[QueryChunk, ...]
    masks: dict[tuple[QueryChunk, int | None], Tensor]
    sequence: Hashable
    """Names the sequence in all its chunks."""
    token_ids: Sequence[int]
    """All of the sequence's."""
    first: int
    last: int

    def row_prefixes(self) -> list[tuple[Hashable, Sequence[int]] | None]:
        """For each row its sequence and all tokens up to the row; None for a dummy. Only a probe asks."""
        named: list[tuple[Hashable, Sequence[int]] | None] = [
            (self.sequence, Prefix(self.token_ids, position + 1)) for position in range(self.first, self.last)
        ]
        return named + [None] * (len(self.cache_rows_T) - len(named))

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        """Attention output ``[T, H, K]``."""
        self.cache.write(form.layer, self.cache_rows_T, key_TGK, value_TGK)
        key, value = (
            rows.transpose(0, 1).unsqueeze(0) for rows in self.cache.read(form.layer, self.key_rows)
        )
        query = query_THK.index_select(0, self.query_rows_L).transpose(0, 1).unsqueeze(0)
        out_1HLK = causal_attention(query, key, value, form, self.chunks, self.masks)
        return out_1HLK[0].transpose(0, 1).index_select(0, self.output_rows_T)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Inputs of one forward."""

    input_ids: Tensor
    """``[1, T]``."""
    position_ids: Tensor
    """``[1, T]``."""
    plan: ChunkPlan
    kept_rows: Tensor
    """``[ROW_MULTIPLE]``: the last row, whose logits predict the token after the chunk."""


def prefill_chunks(
    token_ids: Sequence[int], cache: PagedCache, blocks: Sequence[int], size: int
) -> Iterator[Chunk]:
    """The forwards of one prompt, in order; each must be run before the next.

    Args:
        token_ids: Of the whole prompt.
        cache: Takes keys and values, on a CPU.
        blocks: Of the prompt in the cache.
        size: Tokens of a chunk, from ``chunk_tokens``.
    """
    sequence = object()
    cache_rows = cache.rows_of(blocks, 0, len(token_ids))
    for first in range(0, len(token_ids), size):
        last = min(first + size, len(token_ids))
        yield _chunk(token_ids, cache, cache_rows, first, last, sequence)


def _chunk(
    token_ids: Sequence[int],
    cache: PagedCache,
    cache_rows: Sequence[int],
    first: int,
    last: int,
    sequence: Hashable,
) -> Chunk:
    count = last - first
    num_dummies = -count % ROW_MULTIPLE
    end = round_up(last, QUERY_MULTIPLE)
    chunks = query_chunks(end, first)
    num_keys = max(chunk.keys for chunk in chunks)
    rows_T = torch.tensor([*cache_rows[first:last], *[0] * num_dummies])
    plan = ChunkPlan(
        cache=cache,
        cache_rows_T=rows_T,
        key_rows=torch.tensor(cache_rows)[torch.arange(num_keys).clamp(max=last - 1)],
        query_rows_L=torch.arange(end - first).clamp(max=count - 1),
        output_rows_T=torch.tensor([*range(count), *[0] * num_dummies]),
        chunks=tuple(chunks),
        masks={},
        sequence=sequence,
        token_ids=token_ids,
        first=first,
        last=last,
    )
    return Chunk(
        input_ids=torch.tensor([[*token_ids[first:last], *[token_ids[0]] * num_dummies]]),
        position_ids=torch.tensor([[*range(first, last), *range(num_dummies)]]),
        plan=plan,
        kept_rows=torch.full((ROW_MULTIPLE,), count - 1),
    )
