"""Which sequences a rank gets, and which of them share a forward, so that all ranks make equally many forwards.

Takes token counts, gives lists of indices. Sharded ranks meet in collectives at every forward, so one forward more on
one rank would wait for ever; the number is therefore decided here, for all ranks at once. Moves no data.

Axes: N sequences, R data-parallel ranks.
"""

from collections.abc import Sequence

from trainfer.plan.packing import balance, micro_batches


def deal(lengths: Sequence[int], num_ranks: int, *, balanced: bool) -> list[list[int]]:
    """Indices of each rank's sequences; counts differ by at most one, and every index occurs once.

    ``balanced`` evens out the tokens (``trainer.balance_batch``); otherwise each rank takes a run of neighbours.
    Example: 5 sequences on 2 ranks, not balanced: ``[[0, 1, 2], [3, 4]]``.
    """
    if balanced:
        return balance(lengths, num_ranks)
    share, rest = divmod(len(lengths), num_ranks)
    starts = [rank * share + min(rank, rest) for rank in range(num_ranks + 1)]
    return [list(range(starts[rank], starts[rank + 1])) for rank in range(num_ranks)]


def equal_forwards(
    lengths_by_rank: Sequence[Sequence[int]], *, max_sequences: int | None, max_tokens: int | None
) -> list[list[list[int]]]:
    """Micro-batches of every rank, the same number on each, as few as the fullest rank needs.

    A rank that has fewer sequences than there are forwards gets empty micro-batches at its end: it still makes the
    forward, with nothing to learn from it.

    Args:
        lengths_by_rank: Tokens of each rank's sequences.
        max_sequences: Most sequences of one micro-batch on one rank.
        max_tokens: Most tokens of one. Exactly one of the two limits is given.

    Returns:
        Per rank and micro-batch, indices into that rank's sequences.

    Raises:
        PlanError: a sequence is longer than ``max_tokens``.
    """
    wanted = 1
    while True:
        parts = [
            micro_batches(
                lengths,
                max_sequences=max_sequences,
                max_tokens=max_tokens,
                at_least=max(1, min(wanted, len(lengths))),
            )
            for lengths in lengths_by_rank
        ]
        most = max(len(part) for part in parts)
        if all(
            len(part) in (most, len(lengths)) for part, lengths in zip(parts, lengths_by_rank, strict=True)
        ):
            return [part + [[] for _ in range(most - len(part))] for part in parts]
        wanted = max(
            most, wanted + 1
        )  # it cannot pass the largest number of sequences, where every rank is done
