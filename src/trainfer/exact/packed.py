"""Many sequences as one row axis ``[1, T]``, and the forward that scores their responses.

Takes ragged lists of token ids; gives a ``PackedBatch`` (ids, positions, attention plan, scored rows) and,
through the causal LM's own forward, the logits of exactly the rows that predict response tokens. There is
no padding but at most ``ROW_MULTIPLE - 1`` dummy rows, and equal prompts have their rows once. Loss, log-probs and
sampling are elsewhere.

A response token at position p of its sequence is predicted by the row at position p - 1.

Axes: T rows, S scored rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainfer.exact import gpu
from trainfer.exact.attention import AttentionPlan
from trainfer.exact.layout import RowLayout, lay_out
from trainfer.exact.plan import PackedPlan, plan_layout

__all__ = [
    "ROW_MULTIPLE",
    "CausalModel",
    "PackedBatch",
    "PackedPlan",
    "forward_logits",
    "pack",
    "pack_prompts",
]

ROW_MULTIPLE = 8
"""Rows of every matrix product: below 4 rows per thread the CPU library sums in another order, so that a row
alone and the same row in a batch would differ in their last bits. 8 covers one and two threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Sequences packed for one forward.

    Example: ``pack([[5, 6, 7, 1], [4, 2]], [2, 1])`` scores 7 and 1 (rows 1 and 2) and 2 (row 4):
    ``targets_S = [7, 1, 2]``, ``response_lengths = (2, 1)``, 6 rows and 2 dummy rows.
    """

    input_ids: Tensor
    """``[1, T]``."""
    position_ids: Tensor
    """``[1, T]``, each row's position in its sequence."""
    plan: AttentionPlan
    scored_rows: Tensor
    """``[S rounded up to ROW_MULTIPLE]``; the surplus repeats the last, and a shared prompt's last row comes once for
    each sequence that shares it."""
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
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    device: torch.device | str,
    row_multiple: int = ROW_MULTIPLE,
    share_prompts: bool = True,
) -> PackedBatch:
    """Lay sequences end to end and mark the rows that predict their responses.

    Args:
        sequences: Token ids of prompt and response.
        prompt_lengths: Tokens of each prompt; at least 1, since a response token needs a row before it.
        device: Where the tensors go.
        row_multiple: T becomes a multiple of it; itself a multiple of ``ROW_MULTIPLE``. Another one than that means
            that ranks will slice the rows, which then stay in the order of the sequences: no prompt is shared.
        share_prompts: Compute equal prompts once. Changes neither a logit's bits nor, but for rounding, a gradient.
    """
    for ids, prompt_length in zip(sequences, prompt_lengths, strict=True):
        assert 1 <= prompt_length <= len(ids), "a sequence holds at least one prompt token"
    shares = share_prompts and row_multiple == ROW_MULTIPLE
    layout = lay_out(sequences, prompt_lengths if shares else None)
    targets = [token for ids, length in zip(sequences, prompt_lengths, strict=True) for token in ids[length:]]
    scored = [range(length - 1, len(ids) - 1) for ids, length in zip(sequences, prompt_lengths, strict=True)]
    return _assemble(layout, scored, targets, device, row_multiple)


def pack_prompts(
    sequences: Sequence[Sequence[int]], *, device: torch.device | str, row_multiple: int = ROW_MULTIPLE
) -> PackedBatch:
    """As ``pack``, scoring each sequence's last row, which predicts its next token; ``targets_S`` is empty."""
    last = [range(len(ids) - 1, len(ids)) for ids in sequences]
    return _assemble(lay_out(sequences, None), last, [], device, row_multiple)


def _assemble(
    layout: RowLayout,
    scored: Sequence[range],
    targets: Sequence[int],
    device: torch.device | str,
    row_multiple: int,
) -> PackedBatch:
    """``scored`` holds positions within each sequence."""
    num_dummies = -layout.num_rows % row_multiple
    ids = [*layout.token_ids, *[layout.token_ids[0]] * num_dummies]
    positions = [*layout.positions, *range(num_dummies)]
    rows = [
        row
        for sequence, wanted in zip(layout.sequences, scored, strict=True)
        for row in sequence.rows(wanted)
    ]
    surplus = [rows[-1] if rows else 0] * (-len(rows) % ROW_MULTIPLE if rows else ROW_MULTIPLE)
    return PackedBatch(
        input_ids=torch.tensor([ids], dtype=torch.int64, device=device),
        position_ids=torch.tensor([positions], dtype=torch.int64, device=device),
        plan=_plan(layout, device, row_multiple),
        scored_rows=torch.tensor(rows + surplus, dtype=torch.int64, device=device),
        targets_S=torch.tensor(targets, dtype=torch.int64, device=device),
        sequence_lengths=tuple(sequence.length for sequence in layout.sequences),
        response_lengths=tuple(len(wanted) for wanted in scored),
    )


def _plan(layout: RowLayout, device: torch.device | str, row_multiple: int) -> AttentionPlan:
    make = gpu.plan if torch.device(device).type == "cuda" else plan_layout
    return make(layout, device=device, row_multiple=row_multiple)


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
