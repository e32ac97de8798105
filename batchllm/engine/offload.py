"""KV that leaves the pool before its last use, and comes back: which blocks, under which keys, for whom. Block ids and keys only.

A block is named by the hash chain of the tokens up to its end (`batchllm.storage.keys`), so what a preempted sequence leaves, what the tree
evicts and what an earlier run kept are found in the same way, and nothing else can be found under its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from batchllm.engine.blocks import BlockPool, num_blocks_for
from batchllm.engine.node_order import SoonestUseFirst
from batchllm.planner.tree import PrefixTree
from batchllm.storage.keys import block_key

_MOST_BLOCKS = 1 << 20
"""More blocks than any sequence has."""

_MOST_POSITIONS = 1 << 30
"""More plan positions than any stage has. A float still tells the blocks of a sequence apart above several times as many."""

_PREFETCH_POSITIONS = 64
"""How far ahead of the plan's next position blocks are brought near: about what a few steps admit."""


@dataclass(frozen=True, slots=True)
class StageReuse:
    """What a stage finds in the tiers of the stages before it, and what it leaves there for the next.

    `continues`: its prompts may begin with what an earlier stage computed. `is_continued`: those of the next stage may begin with
    what this one computes, so finished sequences are saved. `number`: of the stage, from 0; next uses of a later one come later.
    """

    continues: bool = False
    is_continued: bool = False
    number: int = 0

    @property
    def first_use(self) -> float:
        """The next use, in the store's unit, of what the stage's first plan position needs."""
        return float(self.number * _MOST_POSITIONS)

    @property
    def end(self) -> float:
        """Above every next use in this stage, and the first of the next: its order is not known yet, but much like this one's."""
        return float((self.number + 1) * _MOST_POSITIONS)


class BlockMover(Protocol):
    """Moves the bytes of pool blocks to and from the tiers (`batchllm.engine.transfer`)."""

    @property
    def is_empty(self) -> bool:
        """Whether no load begun now would find anything."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way and a `poll` would return nothing."""

    def contains(self, key: bytes) -> bool:
        """Whether a load begun now would find the block."""

    def pays(self, num_blocks: int, *, recompute_tokens: int) -> bool:
        """Whether saving blocks is cheaper than computing the `recompute_tokens` tokens of each again; if not, they are counted as let go."""

    def save(self, key: bytes, block: int, *, next_use: float, recompute_tokens: int, keep: bool) -> bool:
        """Keeps a block's bytes. False: the block must not change before `poll` says it is released."""

    def load(self, key: bytes, block: int) -> int:
        """Begins to fill a block; returns a ticket."""

    def prefetch(self, key: bytes, next_use: float) -> None:
        """Brings a block into memory from which a load is quick, if there is room."""

    def drop(self, key: bytes) -> None:
        """The block is not needed any more in this run."""

    def poll(self, timeout_s: float) -> tuple[list[tuple[int, bool]], list[int]]:
        """Ended loads (ticket, whether the bytes are there) and blocks released; waits up to `timeout_s` for the first."""


@dataclass(frozen=True, slots=True)
class Restorable:
    """Blocks that a sequence finds in the tiers behind those in the pool; with them, `num_tokens` of its tokens are there."""

    keys: list[bytes]
    num_tokens: int


@dataclass(slots=True)
class _Restore:
    """One sequence's loads. `blocks_before` were in the pool; `loaded[i]` is None while the i-th load is under way."""

    blocks_before: int
    restorable: Restorable
    tickets: dict[int, int] = field(default_factory=dict)
    loaded: list[bool | None] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return None not in self.loaded


class Offload:
    """Names blocks, saves and restores them. Owned by the scheduler, which owns the blocks."""

    def __init__(
        self,
        *,
        mover: BlockMover,
        root: bytes,
        tree: PrefixTree,
        pool: BlockPool,
        block_size: int,
        persist: bool,
        reuse: StageReuse = StageReuse(),
    ) -> None:
        """`root`: the key before the first block (`storage.keys.root_key`). `persist`: shared blocks are kept for later runs."""
        self.persist = persist
        self._reuse = reuse
        self.num_pinned = 0
        """Blocks that the mover has not copied out of the pool yet."""
        self.may_be_moving = True
        """Whether a `poll` may have something to do: each step asks, and mostly nothing was given to the mover, by earlier stages either."""
        self._mover = mover
        self._root = root
        self._tree = tree
        self._pool = pool
        self._block_size = block_size
        self._node_keys: dict[int, list[bytes]] = {}
        self._saved_nodes: dict[int, list[bytes]] = {}
        self._far_nodes = SoonestUseFirst()  # of the saved nodes, those that were not brought near since
        self._restores: dict[int, _Restore] = {}
        self._slot_of_ticket: dict[int, int] = {}
        self._arriving: set[bytes] = set()
        self._finds_more = persist or reuse.is_continued or not mover.is_empty
        """Whether the tiers may hold more than what waiting sequences and nodes left there in this stage."""

    @property
    def num_restoring(self) -> int:
        return len(self._restores)

    @property
    def can_prefetch(self) -> bool:
        """Whether there is something to bring near, now or later."""
        return not self._far_nodes.is_empty

    def note_release(self, node: int, *, num_blocks: int, last_use: bool) -> bool:
        """The tree lets go of `node`, after its `last_use` or before: whether `save_node` is to be called with its `num_blocks` blocks."""
        if last_use:
            saved = self._saved_nodes.pop(node, ())
            self._far_nodes.discard(node)
            if not self.persist and not self._reuse.is_continued:
                for key in saved:
                    self.may_be_moving = True
                    self._mover.drop(key)
                self._node_keys.pop(node, None)
                return False
        return self.persist or self._pays(num_blocks)

    def save_node(
        self, path: list[int], *, blocks: list[int], tail: int, tokens: np.ndarray, next_use: int, last_use: bool
    ) -> None:
        """The tree lets go of the last node of `path`, and it is worth keeping (`note_release`): for this run, or for others (`last_use`)."""
        node = path[-1]
        size, end = self._block_size, int(self._tree.end[node])
        keys = self._keys(path, tokens, end)[int(self._tree.start[node]) // size :]
        held = [*blocks]
        names = keys[: len(blocks)]
        if tail >= 0 and (self.persist or not last_use):
            held.append(tail)
            names = [*names, self._tail_key(path, tokens, end)]
        first = int(self._tree.start[node]) // size
        for number, (key, block) in enumerate(zip(names, held, strict=True), start=first):
            if last_use and self._reuse.is_continued:
                use = self._next_stage_use(int(self._tree.first[node]), number)
            else:
                use = self._use_at(next_use, number)
            self._save(key, block, next_use=use, keep=self.persist)
        if not last_use:
            self._saved_nodes[node] = names
            self._far_nodes.put(node, next_use)

    def save_sequence(self, path: list[int], *, tokens: np.ndarray, blocks: np.ndarray, position: int) -> None:
        """A preempted sequence's own KV: `tokens` are those computed, `blocks` all its blocks. What nodes own is theirs to save."""
        size = self._block_size
        first = (int(self._tree.end[path[-1]]) if path else 0) // size
        # It may have computed less than it shares.
        if tokens.size <= first * size or not self._pays(num_blocks_for(tokens.size, size) - first):
            return
        keys = self._keys(path, tokens, tokens.size)
        for number in range(first, tokens.size // size):
            self._save(keys[number], int(blocks[number]), next_use=self._use_at(position, number), keep=False)
        if tokens.size % size:
            key = self._tail_key(path, tokens, tokens.size)
            number = tokens.size // size
            self._save(key, int(blocks[number]), next_use=self._use_at(position, number), keep=False)

    def save_finished(self, path: list[int], *, tokens: np.ndarray, blocks: np.ndarray, position: int) -> None:
        """A sequence is done, and the next stage may go on with its `tokens`, those computed: its whole blocks are kept for it."""
        num_shared = (int(self._tree.end[path[-1]]) if path else 0) // self._block_size
        if not self._reuse.is_continued or not self._pays(tokens.size // self._block_size - num_shared):
            return
        for number, key in enumerate(self._keys(path, tokens, tokens.size)):
            if number >= num_shared or not self._mover.contains(key):
                use = self._next_stage_use(position, number)
                self._save(key, int(blocks[number]), next_use=use, keep=False)

    def tokens_to_find(self, num_tokens: int) -> int:
        """Of a prompt that is new in this stage, leading tokens whose KV an earlier stage may have left: whole blocks."""
        return num_tokens // self._block_size * self._block_size if self._reuse.continues else 0

    def find(self, path: list[int], *, tokens: np.ndarray, saved_tokens: int, num_blocks: int) -> Restorable:
        """What of a sequence lies in the tiers, behind its first `num_blocks` blocks. `saved_tokens`: as in `WaitingSequence`."""
        size = self._block_size
        if not (saved_tokens or self._finds_more or any(node in self._saved_nodes for node in path)):
            return Restorable([], num_blocks * size)  # nothing of it was saved: naming its blocks would find nothing
        shared_end = int(self._tree.end[path[-1]]) if path else 0
        keys = self._keys(path, tokens, max(shared_end, saved_tokens))
        stop = num_blocks
        while stop < len(keys) and self._mover.contains(keys[stop]):
            stop += 1
        found, num_tokens = keys[num_blocks:stop], stop * size
        ends = [int(self._tree.end[node]) for node in path] + [saved_tokens]
        for end in sorted((end for end in ends if end // size == stop and end % size), reverse=True):
            key = self._tail_key(path, tokens, end)
            if self._mover.contains(key):
                return Restorable([*found, key], end)
        return Restorable(found, num_tokens)

    def is_arriving(self, restorable: Restorable) -> bool:
        """Whether another sequence is loading one of these blocks: then waiting for it is cheaper than loading it twice."""
        return not self._arriving.isdisjoint(restorable.keys)

    def begin_restore(self, slot: int, restorable: Restorable, *, blocks: np.ndarray, blocks_before: int) -> None:
        """Loads into `blocks`, one for each key."""
        restore = _Restore(blocks_before, restorable, loaded=[None] * len(restorable.keys))
        self._restores[slot] = restore
        self.may_be_moving = True
        for number, key in enumerate(restorable.keys):
            ticket = self._mover.load(key, int(blocks[number]))
            restore.tickets[ticket] = number
            self._slot_of_ticket[ticket] = slot
        self._arriving.update(restorable.keys)

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Sequences whose loads have ended: (slot, tokens that are there, without a gap). A bad block is a miss: computed again."""
        ended, released = self._mover.poll(timeout_s)
        self.may_be_moving = not self._mover.is_quiet
        for block in released:
            # One at a time: a block may have been pinned twice, under two keys.
            self._pool.release(np.array([block], dtype=np.int32))
        self.num_pinned -= len(released)
        for ticket, loaded in ended:
            restore = self._restores[self._slot_of_ticket.pop(ticket)]
            restore.loaded[restore.tickets[ticket]] = loaded
        finished = []
        for slot in [slot for slot, restore in self._restores.items() if restore.done]:
            restore = self._restores.pop(slot)
            self._arriving.difference_update(restore.restorable.keys)
            if all(restore.loaded):
                finished.append((slot, restore.restorable.num_tokens))
            else:
                finished.append((slot, (restore.blocks_before + restore.loaded.index(False)) * self._block_size))
        return finished

    def prefetch(self, use_of: Callable[[int], int], *, position: int) -> None:
        """Brings near what is needed soon after plan position `position`. `use_of`: a node's next use, as seen from there."""
        for node, next_use in self._far_nodes.pop_until(position + _PREFETCH_POSITIONS, use_of):
            self.may_be_moving = True
            first = int(self._tree.start[node]) // self._block_size
            for number, key in enumerate(self._saved_nodes[node], start=first):
                self._mover.prefetch(key, self._use_at(next_use, number))

    def _use_at(self, position: float, number: int) -> float:
        """The next use of block `number` of a sequence that is needed at plan position `position`: of its blocks the deepest goes first.

        Without the blocks before it a block is of no use, so a tier that has to give up some gives up the end.
        """
        return self._reuse.first_use + position + number / _MOST_BLOCKS

    def _next_stage_use(self, position: int, number: int) -> float:
        return self._reuse.end + position + number / _MOST_BLOCKS

    def _pays(self, num_blocks: int) -> bool:
        return self._mover.pays(num_blocks, recompute_tokens=self._block_size)

    def _save(self, key: bytes, block: int, *, next_use: float, keep: bool) -> None:
        self.may_be_moving = True
        if not self._mover.save(key, block, next_use=next_use, recompute_tokens=self._block_size, keep=keep):
            self.num_pinned += 1
            self._pool.share(np.array([block], dtype=np.int32))

    def _keys(self, path: list[int], tokens: np.ndarray, num_tokens: int) -> list[bytes]:
        """Keys of the whole blocks in the first `num_tokens` tokens; those of nodes are computed once."""
        size = self._block_size
        keys: list[bytes] = []
        for node in path:
            stop = int(self._tree.end[node]) // size
            if stop * size > num_tokens:
                break
            cached = self._node_keys.get(node)
            if cached is None:
                cached = self._node_keys[node] = self._chain(keys, tokens, stop)
            keys.extend(cached)
        keys.extend(self._chain(keys, tokens, num_tokens // size))
        return keys

    def _chain(self, before: list[bytes], tokens: np.ndarray, stop: int) -> list[bytes]:
        size = self._block_size
        keys: list[bytes] = []
        parent = before[-1] if before else self._root
        for number in range(len(before), stop):
            parent = block_key(parent, tokens[number * size : (number + 1) * size])
            keys.append(parent)
        return keys

    def _tail_key(self, path: list[int], tokens: np.ndarray, end: int) -> bytes:
        """The key of the partly filled block that ends at token `end`."""
        keys = self._keys(path, tokens, end)
        return block_key(keys[-1] if keys else self._root, tokens[len(keys) * self._block_size : end])
