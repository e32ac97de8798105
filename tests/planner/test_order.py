"""The order of subtrees."""

from __future__ import annotations

import numpy as np

from batchllm.planner.order import blend_order
from batchllm.planner.tree import build_tree


def order_of(lcp: list[int], *, prompt: list[int], decode: list[int]) -> list[int]:
    tree = build_tree(np.array(lcp, dtype=np.int32))
    order, _ = blend_order(tree, prompt_tokens=np.array(prompt), decode_tokens=np.array(decode))
    return list(order.tolist())


def test_equal_prompts_keep_their_order() -> None:
    assert order_of([0, 8, 8, 8], prompt=[8] * 4, decode=[16] * 4) == [0, 1, 2, 3]


def test_the_longest_decode_of_equal_prompts_starts_first() -> None:
    assert order_of([0, 0, 0, 0], prompt=[1] * 4, decode=[100, 400, 200, 300])[0] == 1


def test_a_subtree_with_one_long_decode_goes_before_its_sibling_and_starts_with_it() -> None:
    order = order_of([0, 9, 9, 0, 9, 9], prompt=[10] * 6, decode=[5, 5, 5, 5, 900, 5])
    assert order[:3] == [4, 3, 5]


def test_prefill_heavy_and_decode_heavy_prompts_alternate() -> None:
    num_each = 50
    order = np.array(order_of([0] * 100, prompt=[1000] * 50 + [10] * 50, decode=[10] * 50 + [1000] * 50))
    heavy = np.cumsum(order < num_each)
    progress = np.arange(1, 101) / 2
    assert np.abs(heavy - progress).max() <= 1


def test_the_last_tenth_of_a_heavy_tailed_batch_holds_only_short_decodes() -> None:
    random = np.random.default_rng(1)
    decode = np.minimum(8 + random.pareto(1.2, size=1000) * 20, 512).astype(np.int64)
    prompt = random.integers(30, 90, size=1000)
    order = order_of([0] * 1000, prompt=prompt.tolist(), decode=decode.tolist())
    assert decode[order][-100:].max() <= 2 * decode.mean()
    assert set(np.flatnonzero(decode == 512)) <= set(order[:200])


def test_a_chain_of_nested_prefixes_keeps_every_node_contiguous() -> None:
    size = 2000
    tree = build_tree(np.arange(size, dtype=np.int32))
    decode = np.arange(size)[::-1] % 7
    order, reordered = blend_order(tree, prompt_tokens=np.arange(1, size + 1), decode_tokens=decode)
    for node in range(0, size - 1, 97):
        held = order[reordered.first[node] : reordered.last[node]]
        assert held.min() == reordered.end[node] - 1 and len(held) == size - held.min()
