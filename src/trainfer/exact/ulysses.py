"""Sequence parallelism after Ulysses (Jacobs et al. 2023, arXiv 2309.14509): ranks share the rows of one packed batch.

Takes a ``PackedBatch`` whose T is a multiple of the ranks; gives this rank's slice of it. Everything in a causal LM but
attention works row by row, so each rank computes its slice of T/R rows; around attention one all-to-all trades rows for
heads (every rank then has all rows of H/R heads) and another trades them back. A rank's loss is that of its own rows:
the sum over ranks is the loss of the batch, and summed parameter gradients are its gradient.

Models that mix rows elsewhere than in attention (convolutions, recurrences) cannot be split so and are refused by the
workers. Leaves out which ranks form a group (``workers.mesh``).

Axes: T rows, t = T/R rows of one rank, R ranks of the group, H query heads, G key/value heads, K head size, S scored rows.
"""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from trainfer.errors import ModelError
from trainfer.exact.attention import AttentionForm, AttentionPlan
from trainfer.exact.layout import RowLayout
from trainfer.exact.packed import ROW_MULTIPLE, PackedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShard:
    """This rank's place among the ranks that share sequences."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def row_multiple(self) -> int:
        """T must be a multiple of this, so that every slice keeps the rules of ``packed.ROW_MULTIPLE``."""
        return self.size * ROW_MULTIPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicedBatch:
    """One rank's rows of a packed batch."""

    packed: PackedBatch
    """Rows of this rank; ``response_lengths`` counts each sequence's scored rows among them."""
    first_scored: int
    """Index of this rank's first scored row among all S of the batch."""
    num_scored_whole: int
    """S of the whole batch."""


def check_heads(query_heads: int, kv_heads: int, size: int) -> None:
    """Every rank needs whole heads.

    Raises:
        ModelError: they cannot be dealt to ``size`` ranks.
    """
    if query_heads % size or (kv_heads % size and size % kv_heads):
        raise ModelError(
            f"actor.ulysses_sequence_parallel_size={size} cannot share {query_heads} query heads and {kv_heads} key/value "
            "heads: it must divide the query heads, and divide the key/value heads or be a multiple of them."
        )


def slice_rows(batch: PackedBatch, shard: SequenceShard) -> SlicedBatch:
    """This rank's slice of ``batch``, whose T is a multiple of ``shard.row_multiple``."""
    total = batch.input_ids.shape[1]
    assert total % shard.row_multiple == 0, "pack with row_multiple=shard.row_multiple"
    rows = total // shard.size
    start = shard.rank * rows
    scored = batch.scored_rows[: batch.num_scored].tolist()
    first = sum(row < start for row in scored)
    mine = [row - start for row in scored[first:] if row < start + rows]
    last = first + len(mine)
    surplus = [mine[-1] if mine else 0] * (-len(mine) % ROW_MULTIPLE if mine else ROW_MULTIPLE)
    lengths, begin = [], 0
    for length in batch.response_lengths:
        lengths.append(max(0, min(begin + length, last) - max(begin, first)))
        begin += length
    packed = PackedBatch(
        input_ids=batch.input_ids[:, start : start + rows],
        position_ids=batch.position_ids[:, start : start + rows],
        plan=UlyssesPlan(whole=batch.plan, shard=shard, first_row=start, num_rows=rows),
        scored_rows=torch.tensor(mine + surplus, dtype=torch.int64, device=batch.scored_rows.device),
        targets_S=batch.targets_S[first:last],
        sequence_lengths=batch.sequence_lengths,
        response_lengths=tuple(lengths),
    )
    return SlicedBatch(packed=packed, first_scored=first, num_scored_whole=len(scored))


def whole_rows(values_S: Tensor, batch: SlicedBatch, shard: SequenceShard) -> Tensor:
    """Values of this rank's scored rows, put together with those of the other ranks; no gradient."""
    whole = torch.zeros(batch.num_scored_whole, dtype=values_S.dtype, device=values_S.device)
    whole[batch.first_scored : batch.first_scored + len(values_S)] = values_S.detach()
    dist.all_reduce(whole, group=shard.group)
    return whole


@runtime_checkable
class _Packed(Protocol):
    """A plan of whole sequences."""

    @property
    def layout(self) -> RowLayout: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class UlyssesPlan:
    """Attention over all rows with a share of the heads."""

    whole: AttentionPlan
    shard: SequenceShard
    first_row: int
    """Of this rank, among those of all ranks."""
    num_rows: int
    """t."""

    def row_prefixes(self) -> list[tuple[Hashable, Sequence[int]] | None]:
        """For each row its sequence and all tokens up to the row; None for a dummy row. Only a probe asks."""
        assert isinstance(self.whole, _Packed), "ranks share packed sequences"
        layout = self.whole.layout
        assert not layout.stems, "where ranks slice rows no prompt is shared"
        stop = self.first_row + self.num_rows
        named: list[tuple[Hashable, Sequence[int]] | None] = []
        for number, sequence in enumerate(layout.sequences):
            begin, end = sequence.own_start, sequence.own_start + sequence.length
            ids = layout.token_ids[begin:end]
            tokens = memoryview(array("q", ids))  # slices of it copy nothing
            mine = range(max(begin, self.first_row), min(end, stop))
            named.extend(((number, ids), tokens[: row - begin + 1]) for row in mine)
        return named + [None] * (self.num_rows - len(named))

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        """Attention output ``[t, H, K]`` of this rank's rows."""
        size = self.shard.size
        check_heads(query_THK.shape[1], key_TGK.shape[1], size)
        if key_TGK.shape[1] % size:
            # A rank's query heads all belong to one key/value head, which it shares with its neighbours.
            repeats = size // key_TGK.shape[1]
            key_TGK = key_TGK.repeat_interleave(repeats, dim=1)
            value_TGK = value_TGK.repeat_interleave(repeats, dim=1)
        out = self.whole.attend(
            self._rows_for_heads(query_THK),
            self._rows_for_heads(key_TGK),
            self._rows_for_heads(value_TGK),
            form,
        )
        return self._heads_for_rows(out)

    def _rows_for_heads(self, rows_tHK: Tensor) -> Tensor:
        """``[t, H, K]`` -> ``[T, H/R, K]``."""
        parts = rows_tHK.unflatten(1, (self.shard.size, -1)).transpose(0, 1)  # one block of heads per rank
        return _exchange(parts, self.shard).flatten(0, 1)

    def _heads_for_rows(self, rows_THK: Tensor) -> Tensor:
        """``[T, H/R, K]`` -> ``[t, H, K]``."""
        parts = rows_THK.unflatten(0, (self.shard.size, -1))  # one block of rows per rank
        return _exchange(parts, self.shard).transpose(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, shard: SequenceShard) -> Tensor:
    return _AllToAll.apply(parts.contiguous(), shard.group)


class _AllToAll(torch.autograd.Function):
    """Block r of the first axis goes to rank r, and block r of the result came from it: its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Before empty_like, which would keep strides that collectives ignore.
        gradient = grad_outputs[0].contiguous()
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient, group=ctx.group)
        return out, None
