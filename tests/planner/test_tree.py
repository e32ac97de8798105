"""The prefix tree against a brute-force trie."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner.tree import PrefixTree, build_tree, shared_with_previous

Node = tuple[int, int, int, int]

sequence_lists = st.lists(
    st.lists(st.sampled_from([[0], [1], [3] * 16, [4] * 32, [1, 2, 1]]), min_size=1, max_size=7).map(
        lambda parts: [token for part in parts for token in part]
    ),
    min_size=1,
    max_size=40,
).map(sorted)


def shared_lengths(sequences: list[list[int]]) -> np.ndarray:
    pairs = itertools.pairwise(sequences)
    common = [len(list(itertools.takewhile(lambda ab: ab[0] == ab[1], zip(a, b, strict=False)))) for a, b in pairs]
    return np.array([0, *common][: len(sequences)], dtype=np.int32)


def trie_nodes(sequences: list[list[int]]) -> set[Node]:
    """(start, end, first, last) of each maximal run of tokens with the same two or more prompts below it."""
    holders: dict[tuple[int, ...], list[int]] = {}
    for position, tokens in enumerate(sequences):
        for depth in range(1, len(tokens) + 1):
            holders.setdefault(tuple(tokens[:depth]), []).append(position)
    runs: dict[tuple[int, ...], list[int]] = {}
    for prefix, positions in holders.items():
        if len(positions) > 1:
            assert positions == list(range(positions[0], positions[-1] + 1))
            runs.setdefault(tuple(positions), []).append(len(prefix))
    return {(min(depths) - 1, max(depths), where[0], where[-1] + 1) for where, depths in runs.items()}


def nodes_of(tree: PrefixTree) -> list[Node]:
    columns = (tree.start.tolist(), tree.end.tolist(), tree.first.tolist(), tree.last.tolist())
    return list(zip(*columns, strict=True))


@settings(max_examples=300, deadline=None)
@given(sequences=sequence_lists)
def test_nodes_equal_those_of_a_brute_force_trie(sequences: list[list[int]]) -> None:
    tree = build_tree(shared_lengths(sequences))
    nodes = nodes_of(tree)
    assert len(set(nodes)) == len(nodes)
    assert set(nodes) == trie_nodes(sequences)


@settings(max_examples=300, deadline=None)
@given(sequences=sequence_lists)
def test_each_path_is_the_chain_of_nodes_that_hold_the_position(sequences: list[list[int]]) -> None:
    tree = build_tree(shared_lengths(sequences))
    for position in range(len(sequences)):
        path = tree.path(position)
        assert path == [n for n, node in enumerate(nodes_of(tree)) if node[2] <= position < node[3]]
        depths = [0, *(int(tree.end[n]) for n in path)]
        assert [int(tree.start[n]) for n in path] == depths[:-1]


@settings(max_examples=100, deadline=None)
@given(sequences=sequence_lists)
def test_the_tree_gives_back_the_shared_lengths_it_was_built_from(sequences: list[list[int]]) -> None:
    lcp = shared_lengths(sequences)
    assert shared_with_previous(build_tree(lcp)).tolist() == lcp.tolist()


def test_duplicates_are_one_node_with_many_rows() -> None:
    tree = build_tree(np.array([0, 32, 32, 0], dtype=np.int32))
    assert nodes_of(tree) == [(0, 32, 0, 3)]
    assert tree.leaf_node.tolist() == [0, 0, 0, -1]


def test_a_prompt_that_is_a_prefix_of_others_has_no_tokens_of_its_own() -> None:
    tree = build_tree(shared_lengths([[1] * 16, [1] * 16 + [2], [1] * 16 + [2, 3]]))
    assert nodes_of(tree) == [(0, 16, 0, 3), (16, 17, 1, 3)]
    assert tree.leaf_node.tolist() == [0, 1, 1]


def test_no_prompts_and_one_prompt_have_no_nodes() -> None:
    assert build_tree(np.zeros(0, dtype=np.int32)).num_nodes == 0
    tree = build_tree(np.zeros(1, dtype=np.int32))
    assert tree.num_nodes == 0 and tree.path(0) == []


def test_a_chain_of_ten_thousand_nested_prefixes_is_ten_thousand_nodes_deep() -> None:
    tree = build_tree(np.arange(10_001, dtype=np.int32))
    assert tree.num_nodes == 10_000
    assert len(tree.path(10_000)) == 10_000
