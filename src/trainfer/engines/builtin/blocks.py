"""Who holds which cache block; integers only.

Block 0 is never handed out: rows that stand for nobody write there.
"""


class BlockPool:
    """Free blocks and reference counts. A block is free again when its last holder releases it."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self._free = list(range(num_blocks, 0, -1))
        self._holders = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one holder each; the caller has checked ``num_free``."""
        assert count <= len(self._free)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """Add one holder to each block."""
        for block in blocks:
            assert self._holders[block] > 0
            self._holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Remove one holder from each block."""
        for block in blocks:
            assert self._holders[block] > 0
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """True when writing would be seen by another holder."""
        return self._holders[block] > 1
