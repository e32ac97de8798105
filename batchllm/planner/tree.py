"""The prefix tree: which runs of tokens are shared by which prompts, as arrays over nodes and plan positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_NODE = -1


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Runs of tokens that two or more prompts share; nodes are numbered depth-first, a parent before its children.

    Per node, `[M]`: `parent` int32 (-1 at the root), `start` and `end` int32 (the node's tokens are those at depths
    `[start, end)` of each prompt below it), `first` and `last` int64 (the prompts below it hold the plan positions
    `[first, last)`). A node starts where its parent ends. Per plan position, `[N]`: `leaf_node` int32, the deepest node
    that holds it, or -1. What a prompt has past its leaf node's end is its own.
    """

    parent: np.ndarray
    start: np.ndarray
    end: np.ndarray
    first: np.ndarray
    last: np.ndarray
    leaf_node: np.ndarray

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_prompts(self) -> int:
        return len(self.leaf_node)

    def path(self, position: int) -> list[int]:
        """Nodes above a plan position, the root-most first."""
        nodes = []
        node = int(self.leaf_node[position])
        while node != NO_NODE:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]


def build_tree(lcp: np.ndarray) -> PrefixTree:
    """The tree of prompts in sorted order, from the tokens each shares with the one before: one pass with a stack."""
    first: list[int] = []
    last: list[int] = []
    end: list[int] = []
    parent: list[int] = []
    joins = [NO_NODE]  # per position, the node that joins it to the one before
    open_end, open_node = [0], [NO_NODE]
    for position, shared in enumerate([*lcp[1:].tolist(), 0], start=1):
        begin = position - 1
        while open_end[-1] > shared:
            node = open_node.pop()
            open_end.pop()
            begin = first[node]
            last[node] = position
            # What is left open holds the closed node, unless a node still to open lies between.
            parent[node] = open_node[-1] if open_end[-1] >= shared else len(first)
        if open_end[-1] < shared:
            open_node.append(len(first))
            open_end.append(shared)
            first.append(begin)
            last.append(NO_NODE)
            end.append(shared)
            parent.append(NO_NODE)
        joins.append(open_node[-1])
    join = np.array(joins, dtype=np.int64)
    joins_previous = lcp >= np.append(lcp[1:], 0)
    return number_depth_first(
        first=np.array(first, dtype=np.int64),
        last=np.array(last, dtype=np.int64),
        end=np.array(end, dtype=np.int32),
        parent=np.array(parent, dtype=np.int64),
        leaf_node=np.where(joins_previous, join[:-1], join[1:]) if len(lcp) else join[:0],
    )


def number_depth_first(
    *, first: np.ndarray, last: np.ndarray, end: np.ndarray, parent: np.ndarray, leaf_node: np.ndarray
) -> PrefixTree:
    """The same tree with its nodes numbered parent before child, siblings by plan position."""
    node_order = np.lexsort((end, first))
    number = np.empty(len(node_order) + 1, dtype=np.int32)
    number[node_order] = np.arange(len(node_order), dtype=np.int32)
    number[NO_NODE] = NO_NODE  # the last slot, so that index -1 stays -1
    parent = number[parent[node_order]]
    end = end[node_order]
    return PrefixTree(
        parent=parent,
        start=np.append(end, np.int32(0))[parent],
        end=end,
        first=first[node_order],
        last=last[node_order],
        leaf_node=number[leaf_node],
    )


def shared_with_previous(tree: PrefixTree) -> np.ndarray:
    """int32 `[N]`: tokens each plan position shares with the one before it, the most it shares with any before."""
    shared = np.append(tree.end, np.int32(0))[tree.leaf_node]
    # A position that opens nodes shares only what lies above the root-most of them.
    np.minimum.at(shared, tree.first, tree.start)
    return shared


def own_tokens(tree: PrefixTree, prompt_tokens: np.ndarray) -> np.ndarray:
    """int64 `[N]`: tokens of each prompt that no other prompt shares. `prompt_tokens` int `[N]` by plan position."""
    return prompt_tokens.astype(np.int64) - np.append(tree.end, np.int32(0))[tree.leaf_node]
