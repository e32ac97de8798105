"""Which blocks of the prefix tree are in the pool, and who still needs them.

A full block j of a prompt, tokens [j B, (j + 1) B), is shared by all prompts below the node that holds its last token: that node owns it.
A node that ends inside a block also keeps the block its first sequence wrote there, the node's *tail*: later sequences copy it and go on
behind the node's last token (copy-on-write), so that no shared token is computed twice.

A node holds one reference to each of its blocks while prompts below it wait for admission; when none waits, it lets go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchllm.engine.blocks import BlockPool
from batchllm.plan.tree import PrefixTree


@dataclass(slots=True)
class _NodeBlocks:
    """`blocks[i]` is block `first + i` of the prompts below. The tail may be copied in steps after `tail_step`."""

    first: int
    blocks: list[int] = field(default_factory=list)
    tail: int = -1
    tail_step: int = -1


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a sequence finds in the pool: whole blocks, and perhaps a last one to copy. `num_tokens` counts both.

    `wait`: a longer hit is being written by the step that is planned now and can be copied in the next.
    """

    num_tokens: int
    blocks: list[int]
    copy_from: int = -1
    wait: bool = False


class TreeResidency:
    """The tree's blocks in the pool. The scheduler registers what a step writes, and asks what a sequence finds."""

    def __init__(self, *, tree: PrefixTree, pool: BlockPool, block_size: int) -> None:
        self._tree = tree
        self._pool = pool
        self._block_size = block_size
        self._nodes: dict[int, _NodeBlocks] = {}
        # References that nodes hold, by block: nested nodes may keep one block as the tail of each.
        self._num_holders = np.zeros(pool.num_blocks, dtype=np.int32)
        self._num_waiting = (tree.last - tree.first).astype(np.int64)

    def path(self, position: int) -> list[int]:
        """Nodes above plan position `position`, the topmost first."""
        nodes: list[int] = []
        node = int(self._tree.leaf_node[position])
        while node >= 0:
            nodes.append(node)
            node = int(self._tree.parent[node])
        nodes.reverse()
        return nodes

    def find(self, path: list[int], *, step: int) -> PrefixHit:
        """The longest run of leading tokens whose KV is in the pool, or in whole blocks that step `step` itself writes."""
        size = self._block_size
        blocks: list[int] = []
        for node in path:
            owned = int(self._tree.end[node]) // size - int(self._tree.start[node]) // size
            resident = self._nodes.get(node)
            if resident is not None:
                blocks.extend(resident.blocks)
            if owned > 0 and (resident is None or len(resident.blocks) < owned):
                break
        covered = len(blocks) * size
        tail, tail_end, tail_step = -1, covered, -1
        for node in path:
            resident, end = self._nodes.get(node), int(self._tree.end[node])
            if resident is not None and resident.tail >= 0 and end // size == len(blocks) and end > tail_end:
                tail, tail_end, tail_step = resident.tail, end, resident.tail_step
        if tail >= 0 and tail_step == step:
            return PrefixHit(covered, blocks, wait=True)
        return PrefixHit(tail_end, blocks, copy_from=tail)

    def register(self, path: list[int], *, table: np.ndarray, start: int, stop: int, step: int) -> None:
        """Step `step` writes tokens [start, stop) of a sequence with block ids `table`: its nodes take what they can share."""
        size = self._block_size
        for node in path:
            node_start, end = int(self._tree.start[node]), int(self._tree.end[node])
            if stop <= node_start or self._num_waiting[node] == 0:
                continue
            resident = self._nodes.get(node)
            first = node_start // size
            if resident is None:
                resident = self._nodes[node] = _NodeBlocks(first)
            next_block = first + len(resident.blocks)
            complete = min(stop, end) // size
            if next_block < complete:
                added = table[next_block:complete]
                self._hold(added)
                resident.blocks.extend(int(block) for block in added)
            if end % size and resident.tail < 0 and start < end <= stop:
                resident.tail, resident.tail_step = int(table[end // size]), step
                self._hold(table[end // size : end // size + 1])

    def admit(self, path: list[int]) -> None:
        """A prompt below these nodes runs now; a node for which none waits any more gives its blocks back."""
        for node in path:
            self._num_waiting[node] -= 1
            if self._num_waiting[node] == 0:
                self._release(node)

    def readmit(self, path: list[int]) -> None:
        """A prompt below these nodes was preempted and waits again."""
        for node in path:
            self._num_waiting[node] += 1

    def evict(self, num_blocks: int, *, keep: set[int]) -> int:
        """Gives back blocks that only the tree holds until `num_blocks` are free, farthest next use first; returns how many.

        Nodes in `keep` stay. A node's next use is the plan position of the next prompt below it, so the last in order goes first,
        and of nested nodes the deepest.
        """
        freed = 0
        for node in sorted(self._nodes, key=lambda node: (-int(self._tree.first[node]), -int(self._tree.end[node]))):
            if self._pool.num_free >= num_blocks:
                break
            if node in keep or not self._is_idle(node):
                continue
            before = self._pool.num_free
            self._release(node)
            freed += self._pool.num_free - before
        return freed

    def _is_idle(self, node: int) -> bool:
        """Whether only the tree owns one of the node's blocks, so that evicting it, and others that hold it, frees something."""
        resident = self._nodes[node]
        held = np.array(resident.blocks if resident.tail < 0 else [*resident.blocks, resident.tail], dtype=np.int32)
        return bool((self._pool.reference_counts[held] == self._num_holders[held]).any())

    def _hold(self, blocks: np.ndarray) -> None:
        self._pool.share(blocks)
        self._num_holders[blocks] += 1

    def _release(self, node: int) -> None:
        resident = self._nodes.pop(node, None)
        if resident is None:
            return
        for held in (resident.blocks, [resident.tail] if resident.tail >= 0 else []):
            blocks = np.array(held, dtype=np.int32)
            self._num_holders[blocks] -= 1
            self._pool.release(blocks)
