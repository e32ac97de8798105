"""When a run of tokens is needed: from the order and the tree, nothing guessed.

Where the plan is depth-first, the prompts that need a node hold one interval of plan positions: the node is first computed at its
`first`, needed by every position up to `last`, and dead after it.
"""

from __future__ import annotations

import numpy as np

from batchllm.planner.tree import PrefixTree

NEVER = np.iinfo(np.int64).max


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
