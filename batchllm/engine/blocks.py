"""The block pool: which KV blocks are free, and how many owners each of the others has. Ids only; the bytes live in the pool tensor."""

from __future__ import annotations

import numpy as np


class BlockPool:
    """Free list and reference counts of `num_blocks` blocks.

    A block is free (count 0, on the free list) or owned (count > 0, not on it). Whoever takes a reference gives it back once.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reference_counts = np.zeros(num_blocks, dtype=np.int32)
        # A stack: the block freed last is handed out first, while its bytes may still be in a cache.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> np.ndarray:
        """`count` distinct free blocks, int32, each with one reference. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked of {self.num_free}"
        self.num_free -= count
        taken = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.reference_counts[taken] = 1
        return taken

    def share(self, blocks: np.ndarray) -> None:
        """One more reference to each of `blocks` (distinct, owned)."""
        counts = self.reference_counts[blocks]
        assert bool(counts.all()), "a free block cannot be shared"
        self.reference_counts[blocks] = counts + 1

    def release(self, blocks: np.ndarray) -> None:
        """One reference less to each of `blocks` (distinct, owned); those without an owner become free."""
        self._take_back(blocks, self.reference_counts[blocks] - 1)

    def release_each(self, blocks: np.ndarray) -> None:
        """As many references less to each of `blocks` (owned) as it is named."""
        distinct, times = np.unique(blocks, return_counts=True)
        self._take_back(distinct, self.reference_counts[distinct] - times.astype(np.int32))

    def check_integrity(self) -> None:
        """Raises AssertionError unless each block is either free or owned, once."""
        free = self._free[: self.num_free]
        assert np.unique(free).size == free.size, "a block is on the free list twice"
        assert not self.reference_counts[free].any(), "a free block has owners"
        assert int((self.reference_counts > 0).sum()) + self.num_free == self.num_blocks, "blocks were lost"

    def _take_back(self, blocks: np.ndarray, counts: np.ndarray) -> None:
        """`blocks`, which are distinct, keep `counts` references."""
        assert bool((counts >= 0).all()), "a block was released more often than taken"
        self.reference_counts[blocks] = counts
        freed = blocks[counts == 0]
        self._free[self.num_free : self.num_free + freed.size] = freed
        self.num_free += freed.size


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
