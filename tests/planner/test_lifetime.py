"""Owners, lifetimes and next uses of blocks against the tokens themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner.lifetime import NEVER, block_next_use, block_owner, next_use, remaining_uses
from batchllm.planner.tree import NO_NODE, build_tree

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
@given(prompts=prompt_lists, now=st.integers(0, 25), block_size=st.sampled_from([1, 4, 5]))
def test_the_next_use_of_a_block_is_the_next_prompt_that_starts_with_its_tokens(
    prompts: list[list[int]], now: int, block_size: int
) -> None:
    tree = build_tree(lcp_of(prompts))
    cells = [(p, b) for p, tokens in enumerate(prompts) for b in range(len(tokens) // block_size)]
    holder, block = (np.array([cell[side] for cell in cells], dtype=np.int64) for side in (0, 1))
    found = block_next_use(tree, holder=holder, block=block, block_size=block_size, position=now)
    for (p, b), answer in zip(cells, found.tolist(), strict=True):
        prefix = prompts[p][: (b + 1) * block_size]
        later = [q for q in range(now, len(prompts)) if prompts[q][: len(prefix)] == prefix]
        assert answer == (later[0] if later else NEVER)


def test_a_block_across_a_branch_belongs_to_the_node_below_the_branch() -> None:
    # Two prompts share 20 tokens, a third only the first 8: with blocks of 16, block 0 ends in the pair's own node.
    tree = build_tree(np.array([0, 20, 8], dtype=np.int32))
    owner = block_owner(tree, position=np.array([0, 1, 2, 0]), block=np.array([0, 0, 0, 1]), block_size=16)
    assert owner.tolist() == [1, 1, NO_NODE, NO_NODE]


def test_a_node_dies_after_its_last_position() -> None:
    tree = build_tree(np.array([0, 4, 4, 0], dtype=np.int32))
    node = np.array([0])
    assert [next_use(tree, node=node, position=p)[0] for p in (0, 2, 3)] == [0, 2, NEVER]
    assert [remaining_uses(tree, node=node, position=p)[0] for p in (0, 2, 3)] == [3, 1, 0]
