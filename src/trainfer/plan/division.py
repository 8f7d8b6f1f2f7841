"""Which sequences a rank gets, and which of them share a forward, so that all ranks make equally many forwards.

Takes token counts, gives lists of indices. Sharded ranks meet in collectives at every forward, so one forward more on
one rank would wait for ever; the number is therefore decided here, for all ranks at once. Moves no data.

Axes: N sequences, R data-parallel ranks.
"""

from collections.abc import Hashable, Sequence

from trainfer.plan.packing import balance, micro_batches, micro_batches_of_groups


def deal(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    balanced: bool,
    groups: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Indices of each rank's sequences; counts differ by at most one, and every index occurs once.

    Example: 5 sequences on 2 ranks, not balanced: ``[[0, 1, 2], [3, 4]]``.

    Args:
        lengths: Tokens of each sequence, ``[N]``.
        num_ranks: R.
        balanced: Even out the tokens (``trainer.balance_batch``); otherwise each rank takes a run of neighbours.
        groups: Whose group each sequence is: groups of equal size stay whole where the ranks can have equally many, for
            a rank computes the prompt of a group once.
    """
    if not balanced:
        share, rest = divmod(len(lengths), num_ranks)
        starts = [rank * share + min(rank, rest) for rank in range(num_ranks + 1)]
        return [list(range(starts[rank], starts[rank + 1])) for rank in range(num_ranks)]
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups if groups is not None else range(len(lengths))):
        members.setdefault(group, []).append(index)
    whole = list(members.values())
    if len(whole) % num_ranks or len({len(group) for group in whole}) > 1:
        return balance(lengths, num_ranks)
    dealt = balance([sum(lengths[index] for index in group) for group in whole], num_ranks)
    return [sorted(index for number in numbers for index in whole[number]) for numbers in dealt]


def equal_forwards(
    lengths_by_rank: Sequence[Sequence[int]],
    *,
    max_sequences: int | None,
    max_tokens: int | None,
    groups_by_rank: Sequence[Sequence[Hashable]] | None = None,
) -> list[list[list[int]]]:
    """Micro-batches of every rank, the same number on each: as few as the fullest rank needs.

    A rank that needs fewer cuts its largest ones in two; one that has fewer sequences than there are forwards gets empty
    micro-batches at its end: it still makes the forward, with nothing to learn from it.

    Args:
        lengths_by_rank: Tokens of each rank's sequences.
        max_sequences: Most sequences of one micro-batch on one rank.
        max_tokens: Most tokens of one. Exactly one of the two limits is given.
        groups_by_rank: Whose group each sequence is; a micro-batch then holds whole groups as far as it can.

    Returns:
        Per rank and micro-batch, indices into that rank's sequences.

    Raises:
        PlanError: a sequence is longer than ``max_tokens``.
    """
    parts = [
        micro_batches(lengths, max_sequences=max_sequences, max_tokens=max_tokens)
        if groups_by_rank is None
        else micro_batches_of_groups(
            lengths, groups_by_rank[rank], max_sequences=max_sequences, max_tokens=max_tokens
        )
        for rank, lengths in enumerate(lengths_by_rank)
    ]
    most = max(len(part) for part in parts)
    return [_cut_to(most, part) for part in parts]


def _cut_to(count: int, parts: Sequence[Sequence[int]]) -> list[list[int]]:
    cut = [list(part) for part in parts]
    while len(cut) < count:
        place = max(range(len(cut)), key=lambda number: (len(cut[number]), -number), default=None)
        if place is None or len(cut[place]) < 2:
            cut.append([])
        else:
            part = cut[place]
            cut[place : place + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return cut
