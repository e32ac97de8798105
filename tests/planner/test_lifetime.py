"""When nodes are needed next, against the tokens themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner.lifetime import NEVER, NextUses
from batchllm.planner.tree import build_tree

prompt_lists = st.lists(
    st.lists(st.sampled_from([[0], [1], [3] * 4, [4] * 8]), min_size=1, max_size=6).map(
        lambda parts: [token for part in parts for token in part]
    ),
    min_size=1,
    max_size=25,
).map(sorted)


def lcp_of(prompts: list[list[int]]) -> np.ndarray:
    lcp = np.zeros(len(prompts), dtype=np.int32)
    for p in range(1, len(prompts)):
        while lcp[p] < min(len(prompts[p - 1]), len(prompts[p])) and prompts[p - 1][lcp[p]] == prompts[p][lcp[p]]:
            lcp[p] += 1
    return lcp


@settings(max_examples=150, deadline=None)
@given(data=st.data(), prompts=prompt_lists, shuffled=st.booleans())
def test_the_next_use_of_a_node_is_the_next_prompt_that_starts_with_its_tokens(
    data: st.DataObject, prompts: list[list[int]], shuffled: bool
) -> None:
    tree = build_tree(lcp_of(prompts))
    order = list(range(len(prompts)))
    if shuffled:
        order = data.draw(st.permutations(order))
    next_uses = NextUses(tree, np.array(order, dtype=np.int64))
    for node in range(tree.num_nodes):
        prefix = prompts[tree.first[node]][: tree.end[node]]
        needs = [prompts[place][: len(prefix)] == prefix for place in order]
        for now in range(len(prompts) + 1):
            later = [position for position in range(now, len(prompts)) if needs[position]]
            assert next_uses.of(node, now) == (later[0] if later else NEVER)


def test_a_node_dies_after_its_last_position() -> None:
    tree = build_tree(np.array([0, 4, 4, 0], dtype=np.int32))
    in_order, mixed = (NextUses(tree, np.array(order)) for order in ([0, 1, 2, 3], [1, 3, 0, 2]))
    assert [in_order.of(0, position) for position in range(4)] == [0, 1, 2, NEVER]
    assert [mixed.of(0, position) for position in range(5)] == [0, 2, 2, 3, NEVER]
