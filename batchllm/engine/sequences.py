"""The running sequences as columns, one slot each, so that a step's bookkeeping is array work, not Python per token."""

from __future__ import annotations

import numpy as np


class SequenceTable:
    """State of up to `max_sequences` running sequences. Every attribute is an array over slots.

    `position`: plan position. `rank`: its place in the tree's order, by which rows of a step are ordered. `num_tokens`: prompt and generated tokens.
    `num_computed`: tokens whose KV is in the pool, or in the step being run. `num_cached`: of these, tokens found in the pool at
    admission. `num_forced`: tokens behind the last one that was sampled, which needed no sampling, and wait to be computed with it. `max_tokens`: prompt and generated tokens at which it ends. `is_restoring`: its blocks are being filled
    from a tier, so it cannot run yet; or its last token is on its way from the device, so it runs no more. `block_table` [max_sequences, max_blocks]: its blocks.
    Large columns are allocated as zeros, of which the system maps only what is written.
    """

    def __init__(self, *, max_sequences: int, max_blocks: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.position = np.zeros(max_sequences, dtype=np.int64)
        self.rank = np.zeros(max_sequences, dtype=np.int64)
        self.prompt_length = np.zeros(max_sequences, dtype=np.int32)
        self.num_tokens = np.zeros(max_sequences, dtype=np.int32)
        self.num_computed = np.zeros(max_sequences, dtype=np.int32)
        self.num_forced = np.zeros(max_sequences, dtype=np.int32)
        self.max_tokens = np.zeros(max_sequences, dtype=np.int32)
        self.last_token = np.zeros(max_sequences, dtype=np.int64)
        self.is_restoring = np.zeros(max_sequences, dtype=bool)
        self.num_blocks = np.zeros(max_sequences, dtype=np.int32)
        self.block_table = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        self.tokens = np.zeros((max_sequences, max_tokens), dtype=np.int32)
        self._free = list(range(max_sequences - 1, -1, -1))
        self._running = np.zeros(0, dtype=np.int64)
        # Slots that are not among `_running` yet: to put each in by itself costs as much as all of them.
        self._added: list[int] = []

    @property
    def running(self) -> np.ndarray:
        """Slots in use, int64, ascending in rank."""
        if self._added:
            added = np.array(self._added, dtype=np.int64)
            added = added[np.argsort(self.rank[added])]
            self._running = np.insert(self._running, np.searchsorted(self.rank[self._running], self.rank[added]), added)
            self._added.clear()
        return self._running

    @property
    def num_running(self) -> int:
        return self._running.size + len(self._added)

    def add(self, *, position: int, rank: int, tokens: np.ndarray, prompt_length: int, max_tokens: int) -> int:
        """A slot for a sequence whose tokens so far are `tokens` (prompt, and what it generated before a preemption)."""
        slot = self._free.pop()
        self.position[slot] = position
        self.rank[slot] = rank
        self.prompt_length[slot] = prompt_length
        self.num_tokens[slot] = tokens.size
        self.num_computed[slot] = 0
        self.num_forced[slot] = 0
        self.max_tokens[slot] = max_tokens
        self.last_token[slot] = tokens[-1]
        self.num_blocks[slot] = 0
        self.is_restoring[slot] = False
        self.tokens[slot, : tokens.size] = tokens
        self._added.append(slot)
        return slot

    def remove(self, slots: np.ndarray) -> None:
        """Frees `slots`. Their blocks are the caller's to release."""
        self._free.extend(slots.tolist())
        self._running = self.running[~np.isin(self.running, slots)]

    def append_blocks(self, slot: int, blocks: np.ndarray) -> None:
        """Blocks at the end of one sequence's table."""
        start = int(self.num_blocks[slot])
        self.block_table[slot, start : start + blocks.size] = blocks
        self.num_blocks[slot] += blocks.size

    def append_blocks_each(self, slots: np.ndarray, counts: np.ndarray, blocks: np.ndarray) -> None:
        """Blocks at the end of the tables of the distinct `slots`, `counts` of them each, in turn."""
        owners, places = _in_turn(slots, counts)
        self.block_table[owners, self.num_blocks[owners] + places] = blocks
        self.num_blocks[slots] += counts

    def take_blocks_each(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Takes the last `counts` blocks off the tables of each of the distinct `slots`, and returns them in turn."""
        self.num_blocks[slots] -= counts
        owners, places = _in_turn(slots, counts)
        return self.block_table[owners, self.num_blocks[owners] + places]

    def blocks(self, slot: int) -> np.ndarray:
        """Block ids of one sequence (a view)."""
        return self.block_table[slot, : self.num_blocks[slot]]

    def write_drafts(self, slots: np.ndarray, counts: np.ndarray, token_ids: np.ndarray) -> None:
        """Guesses behind the tokens of `slots`, `counts` of them each, in turn; they are no tokens before they are appended."""
        owners, places = _in_turn(slots, counts)
        self.tokens[owners, self.num_tokens[owners] + places] = token_ids

    def append_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """One generated token for each of `slots`."""
        self.tokens[slots, self.num_tokens[slots]] = token_ids
        self.last_token[slots] = token_ids
        self.num_tokens[slots] += 1


def _in_turn(slots: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each slot as often as `counts` says, and for each of these which one it is: 0, 1, 2, ..."""
    owners = np.repeat(slots, counts)
    return owners, np.arange(owners.size) - np.repeat(np.cumsum(counts) - counts, counts)
