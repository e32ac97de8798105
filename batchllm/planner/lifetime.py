"""When a run of tokens, or a block of it, is needed: from the order and the tree, nothing guessed.

The plan is depth-first, so the prompts that need a node hold one interval of plan positions: the node is first computed
at its `first`, needed by every position up to `last`, and dead after it. A block belongs to the node that holds its
last token, because only prompts that share that token share the whole block.
"""

from __future__ import annotations

import numpy as np

from batchllm.planner.tree import NO_NODE, PrefixTree

NEVER = np.iinfo(np.int64).max


def block_owner(tree: PrefixTree, *, position: np.ndarray, block: np.ndarray, block_size: int) -> np.ndarray:
    """int32: the node that owns block number `block` of the prompt at plan position `position`; -1 if it is private.

    `position` and `block` are int `[B]`. Costs nothing per node of the tree.
    """
    last_token = (np.asarray(block, dtype=np.int64) + 1) * block_size - 1
    node = tree.leaf_node[position]
    climbing = np.flatnonzero(node != NO_NODE)
    private = tree.end[node[climbing]] <= last_token[climbing]
    node[climbing[private]] = NO_NODE
    climbing = climbing[~private]
    # From the leaf up, the first node that starts at or before the token holds it.
    while len(climbing):
        climbing = climbing[tree.start[node[climbing]] > last_token[climbing]]
        node[climbing] = tree.parent[node[climbing]]
    return node


def next_use(tree: PrefixTree, *, node: np.ndarray, position: int) -> np.ndarray:
    """int64: for each node, the first plan position at or after `position` that needs it, or `NEVER`.

    Positions before `position` have been admitted: what they still need is held by reference, not by next use.
    """
    coming = np.maximum(tree.first[node], position)
    return np.where(coming < tree.last[node], coming, NEVER)


def remaining_uses(tree: PrefixTree, *, node: np.ndarray, position: int) -> np.ndarray:
    """int64: how many plan positions at or after `position` need each node."""
    return np.maximum(tree.last[node] - np.maximum(tree.first[node], position), 0)


def block_next_use(
    tree: PrefixTree, *, holder: np.ndarray, block: np.ndarray, block_size: int, position: int
) -> np.ndarray:
    """int64: the next plan position that needs each block, or `NEVER`.

    A block is named by the plan position `holder` of any prompt that contains it and its number `block` in that prompt.
    """
    node = block_owner(tree, position=holder, block=block, block_size=block_size)
    holder = np.asarray(holder, dtype=np.int64)
    private = np.where(holder >= position, holder, NEVER)
    shared = node != NO_NODE
    private[shared] = next_use(tree, node=node[shared], position=position)
    return private


class NextUses:
    """When nodes are needed next, one at a time and for rows in any order. A node's positions are sorted when first asked for."""

    def __init__(self, tree: PrefixTree, tree_position: np.ndarray) -> None:
        """`tree_position` as in `Plan`."""
        self._tree = tree
        self._is_depth_first = bool((tree_position[1:] > tree_position[:-1]).all())
        self._plan_position = np.zeros(0, dtype=np.int64)
        if not self._is_depth_first:
            self._plan_position = np.empty(len(tree_position), dtype=np.int64)
            self._plan_position[tree_position] = np.arange(len(tree_position), dtype=np.int64)
        self._sorted: dict[int, np.ndarray] = {}

    def of(self, node: int, position: int) -> int:
        """The first plan position at or after `position` that needs `node`, or `NEVER`."""
        first, last = int(self._tree.first[node]), int(self._tree.last[node])
        if self._is_depth_first:
            coming = max(first, position)
            return coming if coming < last else int(NEVER)
        positions = self._sorted.get(node)
        if positions is None:
            positions = self._sorted[node] = np.sort(self._plan_position[first:last])
        index = int(np.searchsorted(positions, position))
        return int(positions[index]) if index < positions.size else int(NEVER)
