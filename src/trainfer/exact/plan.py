"""The attention plan of packed rows: which rows attend to which, as indices made once per forward.

Takes a ``RowLayout``; gives a ``PackedPlan`` that every layer's attention calls. Sequences whose rows to compute
begin and end alike are one *group* and one attention call; a shared prompt is computed once, and the sequences that
share it compute the rows after it, against all their keys.

Axes: T rows, n sequences of one group, L rows of each, H, G, K heads and head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfer.exact.attention import (
    QUERY_MULTIPLE,
    AttentionForm,
    QueryChunk,
    causal_attention,
    query_chunks,
    round_up,
)
from trainfer.exact.layout import RowLayout, SequenceRows


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceGroup:
    """Sequences whose queries begin at one position and end at one padded length."""

    query_rows: Tensor
    """``[n * length]`` row of each query; beyond a sequence's end its last row, whose result is dropped."""
    key_rows: Tensor
    """``[n * key_length]`` likewise for keys and values, which begin at position 0."""
    count: int
    length: int
    key_length: int
    chunks: tuple[QueryChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPlan:
    """Attention within each sequence of a packed row axis; one plan serves every layer.

    Example: lengths 3 and 20 are two groups (16 and 32 padded rows); 23 rows and one dummy row make T = 24.
    """

    groups: tuple[SequenceGroup, ...]
    output_rows: Tensor
    """``[T]``: where each row's result lies in the concatenation of all groups. Dummy rows repeat the first."""
    layout: RowLayout
    """Whose rows are whose; a probe reads it."""
    masks: dict[tuple[QueryChunk, int | None], Tensor]
    """By chunk and window; filled as layers ask."""

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        """Attention output ``[T, H, K]``."""
        outputs: list[Tensor] = []
        for group in self.groups:
            query = _gather(query_THK, group.query_rows, group.count, group.length)
            key = _gather(key_TGK, group.key_rows, group.count, group.key_length)
            value = _gather(value_TGK, group.key_rows, group.count, group.key_length)
            out_nHLK = causal_attention(query, key, value, form, group.chunks, self.masks)
            outputs.append(out_nHLK.transpose(1, 2).flatten(0, 1))
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return rows.index_select(0, self.output_rows)


def _gather(rows_THK: Tensor, index: Tensor, count: int, length: int) -> Tensor:
    return rows_THK.index_select(0, index).unflatten(0, (count, length)).transpose(1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Rows to compute of one sequence: positions ``first`` to its end."""

    sequence: SequenceRows
    first: int
    """A multiple of ``QUERY_MULTIPLE``: queries lie in the same blocks as in the whole sequence."""


def plan_layout(layout: RowLayout, *, device: torch.device | str, row_multiple: int) -> PackedPlan:
    """The plan of a layout whose rows are padded to a multiple of ``row_multiple`` with dummies."""
    runs = [_Run(sequence=stem, first=0) for stem in layout.stems] + [
        _Run(sequence=sequence, first=sequence.stem_length // QUERY_MULTIPLE * QUERY_MULTIPLE)
        for sequence in layout.sequences
    ]
    by_shape: dict[tuple[int, int], list[_Run]] = {}
    for run in runs:
        by_shape.setdefault((run.first, round_up(run.sequence.length, QUERY_MULTIPLE)), []).append(run)
    splits = torch.device(device).type == "cpu"
    groups: list[SequenceGroup] = []
    output_rows = torch.zeros(round_up(layout.num_rows, row_multiple), dtype=torch.int64)
    offset = 0
    for (first, end), members in by_shape.items():
        chunks = query_chunks(end, first) if splits else (QueryChunk(first, end, end),)
        key_length = max(chunk.keys for chunk in chunks)
        rows = _member_rows([run.sequence for run in members], key_length)
        groups.append(
            SequenceGroup(
                query_rows=rows[:, first:end].flatten().to(device),
                key_rows=rows.flatten().to(device),
                count=len(members),
                length=end - first,
                key_length=key_length,
                chunks=tuple(chunks),
            )
        )
        for run in members:
            begin, sequence = max(run.first, run.sequence.stem_length), run.sequence
            own = sequence.own_start + begin - sequence.stem_length
            output_rows[own : own + sequence.length - begin] = torch.arange(
                offset + begin - first, offset + sequence.length - first
            )
            offset += end - first
    output_rows[layout.num_rows :] = output_rows[0]
    return PackedPlan(groups=tuple(groups), output_rows=output_rows.to(device), layout=layout, masks={})


def _member_rows(members: Sequence[SequenceRows], length: int) -> Tensor:
    """Rows of positions 0 to ``length - 1``, ``[n, length]``; beyond the end the last position's."""
    column = [
        torch.tensor([[value] for value in values])
        for values in (
            [item.length - 1 for item in members],
            [item.stem_length for item in members],
            [item.stem_start for item in members],
            [item.own_start - item.stem_length for item in members],
        )
    ]
    last, stem_length, stem_start, own_offset = column
    positions = torch.minimum(torch.arange(length)[None], last)
    return positions + torch.where(positions < stem_length, stem_start, own_offset)
