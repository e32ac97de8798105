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
from batchllm.engine.node_order import EvictionOrder, FarthestUseFirst, LeastRecentFirst
from batchllm.engine.offload import Offload
from batchllm.planner.lifetime import NEVER, NextUses
from batchllm.planner.tree import PrefixTree


@dataclass(slots=True)
class _NodeBlocks:
    """`blocks[i]` is block `first + i` of the prompts below, `tail` the block the node ends in, or -1.

    The first `num_written` blocks, and the tail if `tail_written`, hold their tokens; the rest will when the step that is being
    planned has run. `tokens`: those of a prompt below, up to the node's end; kept only where blocks may be offloaded.
    """

    first: int
    tokens: np.ndarray | None
    blocks: list[int] = field(default_factory=list)
    num_written: int = 0
    tail: int = -1
    tail_written: bool = False
    last_step: int = 0


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

    def __init__(
        self,
        *,
        tree: PrefixTree,
        pool: BlockPool,
        block_size: int,
        next_uses: NextUses,
        offload: Offload | None,
        evict_least_recent: bool,
    ) -> None:
        """`offload` is given what leaves before its last use. `evict_least_recent`: by recency, for comparison, not by next use."""
        self._tree = tree
        self._next_uses = next_uses
        self._offload = offload
        self._pool = pool
        self._block_size = block_size
        self._nodes: dict[int, _NodeBlocks] = {}
        self._order: EvictionOrder = (
            LeastRecentFirst(lambda node: self._nodes[node].last_step, tree.end)
            if evict_least_recent
            else FarthestUseFirst(next_uses, tree.end)
        )
        # References that nodes hold, by block: nested nodes may keep one block as the tail of each.
        self._num_holders = np.zeros(pool.num_blocks, dtype=np.int32)
        self._num_waiting = (tree.last - tree.first).astype(np.int64)
        self._fresh: set[int] = set()
        self._unneeded: set[int] = set()

    def settle(self) -> None:
        """The planned step has run: what it wrote can be copied and saved, and nodes that nothing waits for let go."""
        for node in self._fresh & self._nodes.keys():
            resident = self._nodes[node]
            resident.num_written = len(resident.blocks)
            resident.tail_written = resident.tail >= 0
        self._fresh.clear()
        for node in sorted(self._unneeded, reverse=True):
            if self._num_waiting[node] == 0:
                self._release(node, next_use=None)
        self._unneeded.clear()

    def path(self, position: int) -> list[int]:
        """Nodes above plan position `position`, the topmost first."""
        return self._path_to(int(self._tree.leaf_node[position]))

    def _path_to(self, node: int) -> list[int]:
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = int(self._tree.parent[node])
        nodes.reverse()
        return nodes

    def find(self, path: list[int], *, step: int) -> PrefixHit:
        """The longest run of leading tokens whose KV is in the pool, or in whole blocks that the planned step `step` writes."""
        size = self._block_size
        blocks: list[int] = []
        for node in path:
            owned = int(self._tree.end[node]) // size - int(self._tree.start[node]) // size
            resident = self._nodes.get(node)
            if resident is not None:
                blocks.extend(resident.blocks)
                resident.last_step = step
            if owned > 0 and (resident is None or len(resident.blocks) < owned):
                break
        covered = len(blocks) * size
        tail, tail_end, tail_written = -1, covered, True
        for node in path:
            resident, end = self._nodes.get(node), int(self._tree.end[node])
            if resident is not None and resident.tail >= 0 and end // size == len(blocks) and end > tail_end:
                tail, tail_end, tail_written = resident.tail, end, resident.tail_written
        if not tail_written:
            return PrefixHit(covered, blocks, wait=True)
        return PrefixHit(tail_end, blocks, copy_from=tail)

    def register(
        self, path: list[int], *, table: np.ndarray, tokens: np.ndarray, start: int, stop: int, step: int
    ) -> None:
        """The planned step `step` writes tokens [start, stop) of a sequence with blocks `table`: its nodes take what they can share.

        `tokens`: the sequence's, at least `stop` of them.
        """
        size = self._block_size
        for node in path:
            node_start, end = int(self._tree.start[node]), int(self._tree.end[node])
            if stop <= node_start or self._num_waiting[node] == 0:
                continue
            resident = self._nodes.get(node)
            first = node_start // size
            if resident is None:
                kept = None if self._offload is None else tokens[:end].copy()
                resident = self._nodes[node] = _NodeBlocks(first, kept, last_step=step)
                self._order.add(node)
            self._fresh.add(node)
            next_block = first + len(resident.blocks)
            complete = min(stop, end) // size
            if next_block < complete:
                added = table[next_block:complete]
                self._hold(added)
                resident.blocks.extend(int(block) for block in added)
            if end % size and resident.tail < 0 and start < end <= stop:
                resident.tail = int(table[end // size])
                self._hold(table[end // size : end // size + 1])

    def admit(self, path: list[int]) -> None:
        """A prompt below these nodes runs now; a node for which none waits any more lets go when the planned step has run."""
        for node in path:
            self._num_waiting[node] -= 1
            if self._num_waiting[node] == 0:
                self._unneeded.add(node)

    def readmit(self, path: list[int]) -> None:
        """A prompt below these nodes was preempted and waits again."""
        for node in path:
            self._num_waiting[node] += 1

    def evict(self, num_blocks: int, *, keep: set[int], position: int) -> None:
        """Gives back blocks that only the tree holds until `num_blocks` are free; nodes in `keep` stay.

        A node whose next use, at plan position `position` or after, is farthest goes first, and of nested nodes the deepest.
        """
        passed = []
        while self._pool.num_free < num_blocks and (node := self._order.pop(position)) is not None:
            if node in keep or not self._is_idle(node):
                passed.append(node)
            else:
                self._release(node, next_use=self._next_uses.of(node, position))
        for node in passed:
            self._order.add(node)

    def prefetch(self, position: int) -> None:
        """Brings near what left the pool and is needed soon after plan position `position`."""
        if self._offload is not None and self._offload.can_prefetch:
            self._offload.prefetch(lambda node: self._next_uses.of(node, position), position=position)

    def _is_idle(self, node: int) -> bool:
        """Whether only the tree owns one of the node's blocks, so that evicting it, and others that hold it, frees something."""
        resident = self._nodes[node]
        held = np.array(resident.blocks if resident.tail < 0 else [*resident.blocks, resident.tail], dtype=np.int32)
        return bool((self._pool.reference_counts[held] == self._num_holders[held]).any())

    def _hold(self, blocks: np.ndarray) -> None:
        self._pool.share(blocks)
        self._num_holders[blocks] += 1

    def _release(self, node: int, *, next_use: int | None) -> None:
        """The node lets go of its blocks; `next_use` None: no prompt below it waits any more."""
        resident = self._nodes.pop(node, None)
        if resident is None:
            return
        self._order.discard(node)
        if (
            self._offload is not None
            and resident.tokens is not None
            and self._offload.note_release(node, num_blocks=resident.num_written, last_use=next_use is None)
        ):
            self._offload.save_node(
                self._path_to(node),
                blocks=resident.blocks[: resident.num_written],
                tail=resident.tail if resident.tail_written else -1,
                tokens=resident.tokens,
                next_use=NEVER if next_use is None else next_use,
                last_use=next_use is None,
            )
        for held in (resident.blocks, [resident.tail] if resident.tail >= 0 else []):
            blocks = np.array(held, dtype=np.int32)
            self._num_holders[blocks] -= 1
            self._pool.release(blocks)
