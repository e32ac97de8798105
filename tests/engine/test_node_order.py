"""Orders of prefix nodes against the naive way: all of them sorted anew each time."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.engine.node_order import EvictionOrder, FarthestUseFirst, LargestFirst, LeastRecentFirst, SoonestUseFirst
from batchllm.planner.lifetime import NEVER, NextUses
from batchllm.planner.tree import PrefixTree, build_tree


def plan(data: st.DataObject) -> tuple[PrefixTree, NextUses]:
    """A random tree of up to 40 prompts, run in tree order or in another."""
    lcp = data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=40))
    tree = build_tree(np.array([0, *lcp[1:]], dtype=np.int32))
    order = list(range(tree.num_prompts))
    if data.draw(st.booleans()):
        order = data.draw(st.permutations(order))
    return tree, NextUses(tree, np.array(order, dtype=np.int64))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_node_given_up_is_the_one_that_a_sort_by_next_use_puts_first(data: st.DataObject) -> None:
    tree, next_uses = plan(data)
    order: EvictionOrder = FarthestUseFirst(next_uses, tree.end)
    inside: set[int] = set()
    position = 0
    for _ in range(data.draw(st.integers(1, 40)) if tree.num_nodes else 0):
        action = data.draw(st.sampled_from(["add", "add", "discard", "pop", "rise", "fall"]))
        node = data.draw(st.integers(0, tree.num_nodes - 1))
        if action == "add" and node not in inside:
            order.add(node)
            inside.add(node)
        elif action == "discard":
            order.discard(node)
            inside.discard(node)
        elif action == "rise":
            position = data.draw(st.integers(position, tree.num_prompts))
        elif action == "fall":  # does not happen in a run; the order must be right all the same
            position = data.draw(st.integers(0, position))
        elif action == "pop":
            naive = min(inside, key=lambda at: (-next_uses.of(at, position), -int(tree.end[at]), at), default=None)
            assert order.pop(position) == naive
            inside.discard(-1 if naive is None else naive)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_least_recent_node_goes_first_whatever_was_found_since_it_was_put_in(data: st.DataObject) -> None:
    tree, _next_uses = plan(data)
    last_step: Counter[int] = Counter()
    order: EvictionOrder = LeastRecentFirst(lambda node: last_step[node], tree.end)
    inside: set[int] = set()
    for step in range(data.draw(st.integers(1, 40)) if tree.num_nodes else 0):
        action = data.draw(st.sampled_from(["add", "find", "discard", "pop"]))
        node = data.draw(st.integers(0, tree.num_nodes - 1))
        if action == "add" and node not in inside:
            last_step[node] = step
            order.add(node)
            inside.add(node)
        elif action == "find":
            last_step[node] = step
        elif action == "discard":
            order.discard(node)
            inside.discard(node)
        elif action == "pop":
            naive = min(inside, key=lambda at: (last_step[at], -int(tree.end[at]), at), default=None)
            assert order.pop(0) == naive
            inside.discard(-1 if naive is None else naive)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nodes_needed_soon_are_those_that_a_look_at_all_of_them_finds(data: st.DataObject) -> None:
    tree, next_uses = plan(data)
    order = SoonestUseFirst()
    inside: set[int] = set()
    position = 0
    for _ in range(data.draw(st.integers(1, 40)) if tree.num_nodes else 0):
        action = data.draw(st.sampled_from(["put", "put", "discard", "pop", "rise"]))
        node = data.draw(st.integers(0, tree.num_nodes - 1))
        if action == "put":
            order.put(node, next_uses.of(node, position))
            inside.add(node)
        elif action == "discard":
            order.discard(node)
            inside.discard(node)
        elif action == "rise":
            position = data.draw(st.integers(position, tree.num_prompts))
        else:
            last = position + data.draw(st.integers(0, 10))
            uses = {at: next_uses.of(at, position) for at in inside}
            naive = sorted(((use, at) for at, use in uses.items() if use <= last))
            due = order.pop_until(last, uses.__getitem__)
            assert [(use, at) for at, use in due] == naive
            inside -= {at for _use, at in naive}


def test_heaps_stay_as_large_as_what_lives_in_them() -> None:
    largest, soonest = LargestFirst(np.zeros(10, dtype=np.int32)), SoonestUseFirst()
    for turn in range(10_000):
        largest.put(turn % 10, turn)
        soonest.put(turn % 10, turn)
    assert len(largest._heap) <= 2 * 10 + 65 and len(soonest._heap) <= 2 * 10 + 65
    assert largest.pop(lambda node: 9_990 + node) == 9
    assert soonest.pop_until(int(NEVER) - 1, lambda node: 9_990 + node) == [(node, 9_990 + node) for node in range(10)]
