"""Where the tokens of many sequences lie on one row axis; integers only.

Takes ragged token ids; gives a ``RowLayout``: ids and positions of the rows, and which rows each sequence consists
of. A prompt that several sequences share has its rows once: a causal row depends on nothing but the tokens up to
it, so its value serves them all, and its gradient is the sum of theirs.

Leaves out: dummy rows, attention, tensors.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHORTEST_SHARED = 16
"""Prompts below this stay with their sequences: what they would save is less than a group of their own costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRows:
    """The rows of one sequence: the shared prompt's, then its own.

    Example: a prompt of 20 shared rows from row 0 and 3 own rows from row 50 are ``stem_start=0, stem_length=20,
    own_start=50, length=23``; the sequence's position 21 is row 51.
    """

    stem_start: int
    stem_length: int
    """0 where nothing is shared."""
    own_start: int
    length: int
    """Tokens of the whole sequence."""

    def rows(self, positions: Sequence[int]) -> Iterator[int]:
        """Row of each position."""
        offset = self.own_start - self.stem_length
        return (
            self.stem_start + position if position < self.stem_length else offset + position
            for position in positions
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """Rows without dummies.

    Example: prompts of 16 tokens twice, with responses of 2 and 3: 21 rows, the prompt's first, positions
    0..15, 16, 17, 16, 17, 18.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    sequences: tuple[SequenceRows, ...]
    """In the order they were given."""

    @property
    def num_rows(self) -> int:
        """T without dummies."""
        return len(self.token_ids)

    @property
    def stems(self) -> list[SequenceRows]:
        """Shared prompts as sequences of their own, by first row."""
        lengths = {item.stem_start: item.stem_length for item in self.sequences if item.stem_length}
        return [
            SequenceRows(stem_start=start, stem_length=0, own_start=start, length=length)
            for start, length in sorted(lengths.items())
        ]


def lay_out(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int] | None) -> RowLayout:
    """Rows in the order of the sequences, each shared prompt before the first that has it.

    Args:
        sequences: Token ids; each has at least one.
        prompt_lengths: Tokens of each prompt; equal prompts of at least ``SHORTEST_SHARED`` tokens are laid down
            once. None shares nothing.
    """
    assert sequences, "a batch holds at least one sequence"
    assert min(map(len, sequences)) > 0, "a sequence holds at least one token"
    lengths = [0] * len(sequences) if prompt_lengths is None else prompt_lengths
    prompts = [tuple(ids[:length]) for ids, length in zip(sequences, lengths, strict=True)]
    holders = Counter(prompt for prompt in prompts if len(prompt) >= SHORTEST_SHARED)
    starts: dict[tuple[int, ...], int] = {}
    token_ids: list[int] = []
    positions: list[int] = []
    laid: list[SequenceRows] = []
    for ids, prompt in zip(sequences, prompts, strict=True):
        is_shared = holders[prompt] > 1
        if is_shared and prompt not in starts:
            starts[prompt] = len(token_ids)
            token_ids += prompt
            positions += range(len(prompt))
        stem_length = len(prompt) if is_shared else 0
        laid.append(
            SequenceRows(
                stem_start=starts[prompt] if is_shared else 0,
                stem_length=stem_length,
                own_start=len(token_ids),
                length=len(ids),
            )
        )
        token_ids += ids[stem_length:]
        positions += range(stem_length, len(ids))
    return RowLayout(token_ids=tuple(token_ids), positions=tuple(positions), sequences=tuple(laid))
