"""The shapes that forwards on this process's CPU must keep to; measured by ``calibration``, read by ``attention``.

Takes key lengths that were found safe; says how long keys must be and where query rows are cut, and how many rows a
decode step has. One set of rules holds for a process at a time, because trainer and engine must keep to the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

KEY_BLOCK = 512
"""Keys that the CPU kernel handles at a time; only the length within the last block matters."""
KEY_MULTIPLE = 16
"""Key lengths below a vector register's multiple go through another code path (float32, AVX-512)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLengths:
    """Which key lengths give a row the bits that it has with all keys of its block and the surplus masked.

    Example: ``KeyLengths(safe=(16, 32, 512))``: 40 keys are padded to 512, and query rows are cut after row 32,
    so that rows 0..31 do not pay for that.
    """

    safe: tuple[int, ...]
    """Lengths within a block, ascending, multiples of ``KEY_MULTIPLE``; the last one is ``KEY_BLOCK``."""
    decode_rows: int = 8
    """Rows of a decode step are a multiple of this, by dummy rows; ``packed.ROW_MULTIPLE`` is safe where fewer were not tried."""

    def __post_init__(self) -> None:
        assert self.safe[-1] == KEY_BLOCK
        assert self.decode_rows >= 1
        assert all(length % KEY_MULTIPLE == 0 for length in self.safe)

    def padded(self, length: int) -> int:
        """The smallest safe length that is at least ``length``."""
        blocks, rest = divmod(length, KEY_BLOCK)
        return length if rest == 0 else blocks * KEY_BLOCK + next(safe for safe in self.safe if safe >= rest)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ends of query chunks within a block: both sides of each gap, and the block's end."""
        ends = {KEY_BLOCK}
        for before, after in zip((0, *self.safe), self.safe, strict=False):
            if after - before > KEY_MULTIPLE:
                ends |= {before, after}
        return tuple(sorted(ends - {0}))


MEASURED = KeyLengths(safe=(*range(16, 193, 16), *range(384, 513, 16)))
"""A Zen 5 with MKL 2024.2: between these lengths MKL takes another kernel for P·V."""
ORDINARY = KeyLengths(safe=tuple(range(16, 513, 16)), decode_rows=1)
"""Exact mode off: keys are padded to whole vectors alone, and decode has no dummy rows."""

_current: list[KeyLengths] = [MEASURED]


def key_lengths() -> KeyLengths:
    """The rules of this process."""
    return _current[0]


def use_key_lengths(lengths: KeyLengths) -> None:
    """Set the rules of this process, between two steps."""
    _current[0] = lengths


@contextmanager
def using_key_lengths(lengths: KeyLengths) -> Iterator[None]:
    """Other rules for a while."""
    before = key_lengths()
    use_key_lengths(lengths)
    try:
        yield
    finally:
        use_key_lengths(before)
