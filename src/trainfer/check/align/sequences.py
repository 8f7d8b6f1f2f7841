"""Which sequence of one side is which sequence of the other.

Takes the recorded sequences of both sides in any order; gives pairs. They are joined by token ids,
and by index only where ids differ. What the difference means is said elsewhere (``explain.tokens``).
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainfer.check.align.side import Side
from trainfer.check.dump.records import SequenceRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePair:
    """Positions in the two sides' lists of sequences."""

    rollout: int
    train: int
    equal: bool
    """True where the token ids are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceJoin:
    """Example: rollout [[1, 2], [3, 4]] and train [[3, 4], [1, 9]] give (1, 0, equal) and (0, 1, not)."""

    pairs: tuple[SequencePair, ...]
    rollout_only: tuple[int, ...]
    train_only: tuple[int, ...]


def recorded_sequences(side: Side) -> tuple[SequenceRecord, ...]:
    """All ranks' sequences, rank after rank; a place in this list is a sequence's index."""
    return tuple(record for rank in side.ranks for record in side.sequences(rank))


def join_sequences(rollout: Sequence[SequenceRecord], train: Sequence[SequenceRecord]) -> SequenceJoin:
    """Equal token ids first, in order; recorded again (another pass, another rank) it joins the same one."""
    waiting: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
    for index, record in enumerate(rollout):
        waiting[record.tokens].append(index)
    first = {tokens: queue[0] for tokens, queue in waiting.items()}
    pairs: list[SequencePair] = []
    free_train: list[int] = []
    for index, record in enumerate(train):
        queue = waiting.get(record.tokens)
        if queue:
            pairs.append(SequencePair(rollout=queue.popleft(), train=index, equal=True))
        elif record.tokens in first:
            pairs.append(SequencePair(rollout=first[record.tokens], train=index, equal=True))
        else:
            free_train.append(index)
    taken = {pair.rollout for pair in pairs}
    met = {rollout[pair.rollout].tokens for pair in pairs}
    free_rollout = [i for i, record in enumerate(rollout) if i not in taken and record.tokens not in met]
    by_index = _by_index(free_rollout, free_train)
    pairs += [SequencePair(rollout=a, train=b, equal=False) for a, b in by_index]
    return SequenceJoin(
        pairs=tuple(pairs),
        rollout_only=tuple(index for index in free_rollout if index not in dict(by_index)),
        train_only=tuple(index for index in free_train if index not in {b for _, b in by_index}),
    )


def _by_index(free_rollout: list[int], free_train: list[int]) -> list[tuple[int, int]]:
    """The same index where both are free, the rest in order."""
    same = [index for index in free_rollout if index in set(free_train)]
    rest_rollout = [index for index in free_rollout if index not in set(same)]
    rest_train = [index for index in free_train if index not in set(same)]
    return [(index, index) for index in same] + list(zip(rest_rollout, rest_train, strict=False))
