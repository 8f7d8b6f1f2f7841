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


def shares(
    lengths: Sequence[int],
    num_ranks: int,
    limit: ForwardLimit,
    *,
    balanced: bool,
    prompts: Sequence[tuple[int, ...]] | None,
) -> list[Share]:
    """Divide one pass over ``num_ranks`` data-parallel ranks.

    Args:
        lengths: Tokens of each sequence.
        num_ranks: Data-parallel ranks.
        limit: Of one forward on one rank.
        balanced: Even out the tokens of ranks.
        prompts: Of each sequence; equal ones stay together as far as they can, to be computed once. None where ranks
            share sequences: then no prompt is shared.
    """
    dealt = deal(lengths, num_ranks, balanced=balanced, groups=prompts)
    forwards = equal_forwards(
        [[lengths[index] for index in indices] for indices in dealt],
        max_sequences=limit.sequences,
        max_tokens=limit.tokens,
        groups_by_rank=None
        if prompts is None
        else [[prompts[index] for index in indices] for indices in dealt],
    )
    return [
        Share(indices=tuple(indices), micro_batches=tuple(tuple(part) for part in parts))
        for indices, parts in zip(dealt, forwards, strict=True)
    ]


def mini_batch_shares(
    sequences: Sequence[TrainingSequence],
    num_ranks: int,
    limit: ForwardLimit,
    *,
    balanced: bool,
    share_prompts: bool,
) -> list[tuple[Share, MiniBatch]]:
    """Divide one optimizer step; every rank's part knows the totals of all."""
    totals = MiniBatch.whole(sequences).totals
    lengths = [len(sequence.token_ids) for sequence in sequences]
    prompts = [sequence.token_ids[: sequence.prompt_length] for sequence in sequences]
    divided = shares(lengths, num_ranks, limit, balanced=balanced, prompts=prompts if share_prompts else None)
    return [
        (
            share,
            MiniBatch(
                sequences=tuple(sequences[index] for index in share.indices),
                totals=totals,
                micro_batches=share.micro_batches,
            ),
        )
        for share in divided
    ]
