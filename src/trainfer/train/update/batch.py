"""Training sequences as tensors: one micro-batch, aligned token by token.

Takes ``TrainingSequence`` records and each one's token weight; gives the packed ids and flat
``[S]`` tensors. It decides no grouping: see ``plan.packing``.

Axes: S scored rows (response tokens, sequence after sequence).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from trainfer.exact.packed import ROW_MULTIPLE, PackedBatch, pack
from trainfer.exact.ulysses import SequenceShard, SlicedBatch, slice_rows
from trainfer.train.update.aggregate import MiniBatchTotals
from trainfer.types import SampledSequence, TrainingSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """This rank's part of one optimizer step.

    Example: rank 0 of 2 holds 4 of 8 sequences; ``totals`` counts all 8.
    """

    sequences: tuple[TrainingSequence, ...]
    totals: MiniBatchTotals
    """Over all ranks."""
    micro_batches: tuple[tuple[int, ...], ...] | None = None
    """Indices of the sequences of each forward, where ranks must make equally many; an empty one is a forward that
    trains nothing. None: as few as the limit allows."""

    @classmethod
    def whole(cls, sequences: Sequence[TrainingSequence]) -> "MiniBatch":
        """A mini-batch that lies on one rank."""
        totals = MiniBatchTotals(
            tokens=sum(sum(sequence.loss_mask) for sequence in sequences), sequences=len(sequences)
        )
        return cls(sequences=tuple(sequences), totals=totals)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Tensors of the sequences of one forward and backward."""

    packed: PackedBatch
    """Rows of this rank."""
    response_lengths: tuple[int, ...]
    """Response tokens of each sequence, all ranks' rows together."""
    sliced: SlicedBatch | None
    """None where this rank holds whole sequences."""
    temperatures_S: Tensor
    advantages_S: Tensor
    mask_S: Tensor
    token_weights_S: Tensor
    old_logprobs_S: Tensor | None
    """None: the log-probs of this very forward, detached (see ``trainer.py``)."""
    ref_logprobs_S: Tensor | None
    rollout_weights_S: Tensor | None


def training_sequences(
    sequences: Sequence[SampledSequence],
    advantages: Sequence[float],
    *,
    old_logprobs: Sequence[tuple[float, ...]] | None,
    ref_logprobs: Sequence[tuple[float, ...]] | None,
    rollout_weights: Sequence[tuple[float, ...]] | None,
) -> list[TrainingSequence]:
    """What the update needs of each sampled sequence; every response token trains with its sequence's advantage."""
    return [
        TrainingSequence(
            token_ids=sequence.token_ids,
            prompt_length=len(sequence.prompt.token_ids),
            temperature=sequence.sampling.temperature,
            old_logprobs=None if old_logprobs is None else old_logprobs[index],
            ref_logprobs=None if ref_logprobs is None else ref_logprobs[index],
            advantages=(advantage,) * len(sequence.response_ids),
            loss_mask=(True,) * len(sequence.response_ids),
            rollout_weights=None if rollout_weights is None else rollout_weights[index],
        )
        for index, (sequence, advantage) in enumerate(zip(sequences, advantages, strict=True))
    ]


NOTHING_TO_LEARN = TrainingSequence(
    token_ids=(0, 0),
    prompt_length=1,
    temperature=1.0,
    old_logprobs=None,
    ref_logprobs=None,
    advantages=(0.0,),
    loss_mask=(False,),
)
"""Stands in an empty micro-batch: its gradient is exactly 0."""


def micro_batch(
    sequences: Sequence[TrainingSequence],
    token_weights: Sequence[float],
    *,
    device: torch.device | str,
    shard: SequenceShard | None = None,
) -> MicroBatch:
    """Pack sequences; ``token_weights`` has one factor per sequence (see ``aggregate.py``).

    With a ``shard`` the tensors hold this rank's rows only.
    """
    whole = pack(
        [sequence.token_ids for sequence in sequences],
        [sequence.prompt_length for sequence in sequences],
        device=device,
        row_multiple=ROW_MULTIPLE if shard is None else shard.row_multiple,
    )
    sliced = None if shard is None else slice_rows(whole, shard)
    packed = whole if sliced is None else sliced.packed
    first = 0 if sliced is None else sliced.first_scored
    rows = slice(first, first + packed.num_scored)
    repeats = torch.tensor(packed.response_lengths)

    def per_sequence(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(repeats).to(device)

    def per_token(field: Callable[[TrainingSequence], Iterable[float] | None]) -> Tensor | None:
        lists = [values for values in map(field, sequences) if values is not None]
        assert len(lists) in (0, len(sequences)), "either every sequence of an update has a field or none"
        return (
            torch.tensor(list(chain.from_iterable(lists))[rows], dtype=torch.float32, device=device)
            if lists
            else None
        )

    advantages = per_token(lambda sequence: sequence.advantages)
    assert advantages is not None
    mask = list(chain.from_iterable(sequence.loss_mask for sequence in sequences))[rows]
    return MicroBatch(
        packed=packed,
        response_lengths=whole.response_lengths,
        sliced=sliced,
        temperatures_S=per_sequence([sequence.temperature for sequence in sequences]),
        advantages_S=advantages,
        mask_S=torch.tensor(mask, dtype=torch.bool, device=device),
        token_weights_S=per_sequence(token_weights),
        old_logprobs_S=per_token(lambda sequence: sequence.old_logprobs),
        ref_logprobs_S=per_token(lambda sequence: sequence.ref_logprobs),
        rollout_weights_S=per_token(lambda sequence: sequence.rollout_weights),
    )
