"""Many sequences as one row axis ``[1, T]``, and the forward that scores their responses.

Takes ragged lists of token ids; gives a ``PackedBatch`` (ids, positions, attention plan, scored rows) and,
through the causal LM's own forward, the logits of exactly the rows that predict response tokens. There is
no padding but at most ``ROW_MULTIPLE - 1`` dummy rows. Loss, log-probs and sampling are elsewhere.

A response token at position p of its sequence is predicted by the row at position p - 1.

Axes: T rows, S scored rows, V vocabulary, n sequences of one padded length, H, G, K heads and head size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainfer.exact.attention import (
    QUERY_MULTIPLE,
    AttentionForm,
    AttentionPlan,
    causal_attention,
    query_chunks,
    round_up,
)

ROW_MULTIPLE = 8
"""Rows of every matrix product: below 4 rows per thread the CPU library sums in another order, so that a row
alone and the same row in a batch would differ in their last bits. 8 covers one and two threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceGroup:
    """Sequences of one padded length."""

    query_rows: Tensor
    """``[n * length]`` row of each query; beyond a sequence's end its last row, whose result is dropped."""
    key_rows: Tensor
    """``[n * key_length]`` likewise for keys and values."""
    count: int
    length: int
    key_length: int
    chunks: list[tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPlan:
    """Attention within each sequence of a packed row axis; one plan serves every layer.

    Example: lengths 3 and 20 are two groups (16 and 32 padded rows); 23 rows and one dummy row make T = 24.
    """

    groups: tuple[SequenceGroup, ...]
    output_rows: Tensor
    """``[T]``: where each row's result lies in the concatenation of all groups. Dummy rows repeat the first."""

    def attend(self, query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, form: AttentionForm) -> Tensor:
        """Attention output ``[T, H, K]``."""
        outputs: list[Tensor] = []
        for group in self.groups:
            query = _gather(query_THK, group.query_rows, group.count, group.length)
            key = _gather(key_TGK, group.key_rows, group.count, group.key_length)
            value = _gather(value_TGK, group.key_rows, group.count, group.key_length)
            out_nHLK = causal_attention(query, key, value, form, group.chunks)
            outputs.append(out_nHLK.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.output_rows)


def _gather(rows_THK: Tensor, index: Tensor, count: int, length: int) -> Tensor:
    return rows_THK.index_select(0, index).unflatten(0, (count, length)).transpose(1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Sequences packed for one forward.

    Example: ``pack([[5, 6, 7, 1], [4, 2]], [2, 1])`` scores 7 and 1 (rows 1 and 2) and 2 (row 4):
    ``targets_S = [7, 1, 2]``, ``response_lengths = (2, 1)``, 6 rows and 2 dummy rows.
    """

    input_ids: Tensor
    """``[1, T]``."""
    position_ids: Tensor
    """``[1, T]``, from 0 in each sequence."""
    plan: PackedPlan
    scored_rows: Tensor
    """``[S rounded up to ROW_MULTIPLE]``; the surplus repeats the last."""
    targets_S: Tensor
    sequence_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]

    @property
    def num_scored(self) -> int:
        """S."""
        return sum(self.response_lengths)


class CausalOutput(Protocol):
    """What a causal LM's forward returns."""

    @property
    def logits(self) -> Tensor:
        """``[1, rows, V]``."""
        ...


class CausalModel(Protocol):
    """A causal LM of Transformers, as far as it is called here."""

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        logits_to_keep: Tensor | int,
        attention_plan: AttentionPlan,
    ) -> CausalOutput:
        """The model's own forward, soft-caps and scales of its head included."""
        ...


def pack(
    sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], *, device: torch.device | str
) -> PackedBatch:
    """Lay sequences end to end and mark the rows that predict their responses.

    Args:
        sequences: Token ids of prompt and response.
        prompt_lengths: Tokens of each prompt; at least 1, since a response token needs a row before it.
        device: Where the tensors go.
    """
    targets: list[int] = []
    scored: list[range] = []
    for ids, prompt_length in zip(sequences, prompt_lengths, strict=True):
        assert 1 <= prompt_length <= len(ids), "a sequence holds at least one prompt token"
        targets.extend(ids[prompt_length:])
        scored.append(range(prompt_length - 1, len(ids) - 1))
    return _assemble(sequences, scored, targets, device)


def pack_prompts(sequences: Sequence[Sequence[int]], *, device: torch.device | str) -> PackedBatch:
    """As ``pack``, scoring each sequence's last row, which predicts its next token; ``targets_S`` is empty."""
    return _assemble(sequences, [range(len(ids) - 1, len(ids)) for ids in sequences], [], device)


def _assemble(
    sequences: Sequence[Sequence[int]],
    scored: Sequence[range],
    targets: Sequence[int],
    device: torch.device | str,
) -> PackedBatch:
    lengths = [len(ids) for ids in sequences]
    starts = _starts(lengths)
    num_dummies = -sum(lengths) % ROW_MULTIPLE
    ids = [token for sequence in sequences for token in sequence] + [sequences[0][0]] * num_dummies
    positions = [torch.arange(length) for length in (*lengths, num_dummies)]
    rows = [start + row for start, rows in zip(starts, scored, strict=True) for row in rows]
    surplus = [rows[-1] if rows else 0] * (-len(rows) % ROW_MULTIPLE if rows else ROW_MULTIPLE)
    return PackedBatch(
        input_ids=torch.tensor([ids], dtype=torch.int64, device=device),
        position_ids=torch.cat(positions)[None].to(device),
        plan=plan_rows(lengths, device=device),
        scored_rows=torch.tensor(rows + surplus, dtype=torch.int64, device=device),
        targets_S=torch.tensor(targets, dtype=torch.int64, device=device),
        sequence_lengths=tuple(lengths),
        response_lengths=tuple(len(rows) for rows in scored),
    )


def _starts(lengths: Iterable[int]) -> list[int]:
    starts: list[int] = []
    position = 0
    for length in lengths:
        starts.append(position)
        position += length
    return starts


def plan_rows(lengths: Sequence[int], *, device: torch.device | str) -> PackedPlan:
    """The attention plan of sequences of these lengths, laid end to end and padded to ``ROW_MULTIPLE`` rows."""
    assert lengths, "a batch holds at least one sequence"
    assert min(lengths) > 0, "a sequence holds at least one token"
    starts = _starts(lengths)
    by_padded_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_padded_length.setdefault(round_up(length, QUERY_MULTIPLE), []).append(index)
    splits = torch.device(device).type == "cpu"
    groups: list[SequenceGroup] = []
    output_starts = [0] * len(lengths)
    offset = 0
    for padded, members in by_padded_length.items():
        chunks = query_chunks(padded) if splits else [(0, padded, padded)]
        key_length = max(keys for _, _, keys in chunks)
        groups.append(
            SequenceGroup(
                query_rows=_member_rows(starts, lengths, members, padded).to(device),
                key_rows=_member_rows(starts, lengths, members, key_length).to(device),
                count=len(members),
                length=padded,
                key_length=key_length,
                chunks=chunks,
            )
        )
        for place, index in enumerate(members):
            output_starts[index] = offset + place * padded
        offset += len(members) * padded
    pieces = [torch.arange(start, start + n) for start, n in zip(output_starts, lengths, strict=True)]
    pieces.append(torch.full((-sum(lengths) % ROW_MULTIPLE,), output_starts[0]))
    return PackedPlan(groups=tuple(groups), output_rows=torch.cat(pieces).to(device))


def _member_rows(
    starts: Sequence[int], lengths: Sequence[int], members: Sequence[int], padded: int
) -> Tensor:
    start = torch.tensor([starts[index] for index in members])[:, None]
    last = torch.tensor([lengths[index] - 1 for index in members])[:, None]
    return (start + torch.minimum(torch.arange(padded)[None], last)).flatten()


def forward_logits(model: CausalModel, batch: PackedBatch) -> Tensor:
    """Logits ``[S, V]`` of the scored rows, in the model's own dtype, with autograd as usual."""
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.scored_rows,
        attention_plan=batch.plan,
    )
    return output.logits[0, : batch.num_scored]
