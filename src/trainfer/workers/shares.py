"""What each rank gets of a pass: which sequences, in which forwards. Plain integers, then records; no tensor.

Takes lengths and the plan; gives one share per data-parallel rank. Ranks that share sequences get the same share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainfer.plan.division import deal, equal_forwards
from trainfer.train.update.batch import MiniBatch
from trainfer.train.update.logprob import ForwardLimit
from trainfer.types import TrainingSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Of one data-parallel rank.

    Example: sequences 4 and 1 of the pass, each in a forward of its own: ``indices=(1, 4), micro_batches=((0,), (1,))``.
    """

    indices: tuple[int, ...]
    """Into the sequences of the pass."""
    micro_batches: tuple[tuple[int, ...], ...]
    """Into ``indices``; equally many on every rank."""


def shares(lengths: Sequence[int], num_ranks: int, limit: ForwardLimit, *, balanced: bool) -> list[Share]:
    """Divide one pass over ``num_ranks`` data-parallel ranks."""
    dealt = deal(lengths, num_ranks, balanced=balanced)
    forwards = equal_forwards(
        [[lengths[index] for index in indices] for indices in dealt],
        max_sequences=limit.sequences,
        max_tokens=limit.tokens,
    )
    return [
        Share(indices=tuple(indices), micro_batches=tuple(tuple(part) for part in parts))
        for indices, parts in zip(dealt, forwards, strict=True)
    ]


def mini_batch_shares(
    sequences: Sequence[TrainingSequence], num_ranks: int, limit: ForwardLimit, *, balanced: bool
) -> list[tuple[Share, MiniBatch]]:
    """Divide one optimizer step; every rank's part knows the totals of all."""
    totals = MiniBatch.whole(sequences).totals
    lengths = [len(sequence.token_ids) for sequence in sequences]
    return [
        (
            share,
            MiniBatch(
                sequences=tuple(sequences[index] for index in share.indices),
                totals=totals,
                micro_batches=share.micro_batches,
            ),
        )
        for share in shares(lengths, num_ranks, limit, balanced=balanced)
    ]
