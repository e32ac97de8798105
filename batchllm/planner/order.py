"""Chooses the order in which subtrees run: depth-first always, siblings so that the machine stays evenly loaded.

Siblings (subtrees and single prompts alike) are split at their common ratio of prefill to decode tokens into two
queues, prefill-heavy and decode-heavy. Each queue runs its longest decode first, so that no long decode is left to run
alone at the end, and the queues are merged in proportion to their work, so that every stretch of the plan carries about
the same mix. Nothing random; ties keep token order.

Where the longest rows decide when a batch ends, siblings can run in one queue, longest decode first: see `planner/drain`.
"""

from __future__ import annotations

import numpy as np

from batchllm.planner.intervals import interval_max, interval_sum
from batchllm.planner.tree import NO_NODE, PrefixTree, number_depth_first, own_tokens


def blend_order(
    tree: PrefixTree, *, prompt_tokens: np.ndarray, decode_tokens: np.ndarray, longest_first: bool = False
) -> tuple[np.ndarray, PrefixTree]:
    """Reorders siblings; returns int64 `[N]`, the old position at each new one, and the tree over the new positions.

    Int `[N]` by old position: `prompt_tokens`, the prompt's length; `decode_tokens`, the most that it may generate. `longest_first`: in one
    queue, whatever their mix.
    """
    num_nodes, num_prompts = tree.num_nodes, tree.num_prompts
    if num_prompts == 0:
        return np.zeros(0, dtype=np.int64), tree
    spans = {"first": tree.first, "last": tree.last}
    parent = np.concatenate((tree.parent, tree.leaf_node)).astype(np.int64)
    size = np.concatenate((tree.last - tree.first, np.ones(num_prompts, dtype=np.int64)))
    longest = np.concatenate((interval_max(decode_tokens, **spans), decode_tokens)).astype(np.int64)
    own = own_tokens(tree, prompt_tokens)
    below = interval_sum(tree.end - tree.start, first=np.arange(num_nodes), last=np.searchsorted(tree.first, tree.last))
    prefill = np.concatenate((interval_sum(own, **spans) + below, own)).astype(np.float64)
    decode = np.concatenate((interval_sum(decode_tokens, **spans), decode_tokens)).astype(np.float64)
    position = np.concatenate((tree.first, np.arange(num_prompts, dtype=np.int64)))

    if longest_first:
        sibling_order = np.lexsort((position, -longest, parent))
    else:
        sibling_order = _sibling_order(parent, prefill=prefill, decode=decode, longest=longest, position=position)
    offset = np.empty(len(parent), dtype=np.int64)
    offset[sibling_order] = _before_in_family(parent[sibling_order], size[sibling_order])

    first = _add_ancestors(offset[:num_nodes], tree.parent)
    new_position = offset[num_nodes:] + np.append(first, 0)[tree.leaf_node]
    old_position = np.empty(num_prompts, dtype=np.int64)
    old_position[new_position] = np.arange(num_prompts, dtype=np.int64)
    reordered = number_depth_first(
        first=first,
        last=first + size[:num_nodes],
        end=tree.end,
        parent=tree.parent,
        leaf_node=tree.leaf_node[old_position],
    )
    return old_position, reordered


def _sibling_order(
    parent: np.ndarray, *, prefill: np.ndarray, decode: np.ndarray, longest: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """Items family by family, each family in the order in which it should run."""
    prefill_share = prefill / np.maximum(prefill + decode, 1)
    family_prefill = np.bincount(parent + 1, weights=prefill)
    family_share = family_prefill / np.maximum(family_prefill + np.bincount(parent + 1, weights=decode), 1)
    prefill_heavy = prefill_share > family_share[parent + 1]
    queue = 2 * (parent + 1) + prefill_heavy
    in_queue = np.lexsort((position, -longest, queue))
    # An item's turn is the share of its queue's work that comes before it: two queues of any size end together.
    work = (prefill + decode)[in_queue]
    queue = queue[in_queue]
    total = np.bincount(queue, weights=work)
    turn = _before_in_family(queue, work) / np.maximum(total[queue], 1)
    return in_queue[np.lexsort((position[in_queue], -longest[in_queue], turn, parent[in_queue]))]


def _before_in_family(family: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sum of the values before each item within its run of equal `family`."""
    before = np.cumsum(values) - values
    begin = np.flatnonzero(np.append(True, family[1:] != family[:-1]))
    return before - np.repeat(before[begin], np.diff(np.append(begin, len(family))))


def _add_ancestors(offset: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Each node's offset plus those of all nodes above it, by pointer doubling: log2(depth) rounds."""
    total = np.append(offset, 0)
    above = np.append(parent, NO_NODE).astype(np.int64)
    while (above != NO_NODE).any():
        total = total + total[above]
        above = above[above]
    return total[:-1]
