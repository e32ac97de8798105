"""The plan of a batch, checked from the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner.plan import make_plan, most_decode_tokens

Stage = Callable[..., Any]

batches = st.lists(
    st.tuples(
        st.lists(st.sampled_from([[0], [1], [3] * 16, [4] * 32, [1, 2, 1]]), min_size=1, max_size=6).map(
            lambda parts: [token for part in parts for token in part]
        ),
        st.sampled_from([1, 16, 500]),
    ),
    max_size=30,
)


def common_prefix(a: list[int], b: list[int]) -> int:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


@settings(max_examples=200, deadline=None)
@given(batch=batches)
def test_every_prompt_is_planned_once_and_each_node_is_one_run_of_equal_tokens(
    stage_prompts: Stage, batch: Any
) -> None:
    prompts = [prompt for prompt, _ in batch]
    plan = make_plan(stage_prompts(prompts, [limit for _, limit in batch]), prefix_sharing=True)
    assert sorted(plan.order.tolist()) == list(range(len(prompts)))
    planned = [prompts[i] for i in plan.order]
    for node in range(plan.tree.num_nodes):
        first, last, end = int(plan.tree.first[node]), int(plan.tree.last[node]), int(plan.tree.end[node])
        holders = [p for p, tokens in enumerate(planned) if tokens[:end] == planned[first][:end]]
        assert holders == list(range(first, last)) and len(holders) > 1


@settings(max_examples=200, deadline=None)
@given(batch=batches)
def test_shared_tokens_are_the_most_that_any_earlier_position_has_in_common(stage_prompts: Stage, batch: Any) -> None:
    prompts = [prompt for prompt, _ in batch]
    plan = make_plan(stage_prompts(prompts, [limit for _, limit in batch]), prefix_sharing=True)
    planned = [prompts[i] for i in plan.order]
    for position, tokens in enumerate(planned):
        most = max((common_prefix(tokens, earlier) for earlier in planned[:position]), default=0)
        assert plan.shared_tokens[position] == most
    distinct_prefixes = {tuple(tokens[:end]) for tokens in prompts for end in range(1, len(tokens) + 1)}
    assert plan.unique_prompt_tokens == len(distinct_prefixes)
    assert plan.total_prompt_tokens == sum(len(tokens) for tokens in prompts)


def test_without_prefix_sharing_the_tree_is_empty_and_nothing_is_reused(stage_prompts: Stage) -> None:
    plan = make_plan(stage_prompts([[1, 2], [1, 2], [1]], [4, 8, 2]), prefix_sharing=False)
    assert plan.tree.num_nodes == 0
    assert plan.reuse_ceiling == 0.0
    assert plan.unique_prompt_tokens == 5


def test_the_reuse_ceiling_of_three_equal_prompts_is_two_thirds(stage_prompts: Stage) -> None:
    assert make_plan(stage_prompts([[5] * 32] * 3), prefix_sharing=True).reuse_ceiling == pytest.approx(2 / 3)


def test_the_plan_is_the_same_whatever_the_window_of_the_sort(stage_prompts: Stage) -> None:
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 2, size=random.integers(1, 60)).tolist() for _ in range(200)]
    store = stage_prompts(prompts, random.integers(1, 9, size=200).tolist())
    wide, narrow = (make_plan(store, prefix_sharing=True, window_bytes=size) for size in (1 << 20, 64))
    assert wide.order.tolist() == narrow.order.tolist()
    assert wide.tree.parent.tolist() == narrow.tree.parent.tolist()


def test_what_a_prompt_may_generate_ends_at_the_context(stage_prompts: Stage) -> None:
    store = stage_prompts([[1] * 10, [1] * 95, [1] * 120], [20, 20, 20])
    assert most_decode_tokens(store, max_model_tokens=100).tolist() == [20, 5, 0]
    assert most_decode_tokens(store, max_model_tokens=None).tolist() == [20, 20, 20]


def test_shared_tokens_are_reused_but_never_the_last_token(stage_prompts: Stage) -> None:
    plan = make_plan(stage_prompts([[1] * 32, [1] * 32, [1] * 40 + [2]]), prefix_sharing=True)
    assert plan.prompt_tokens.tolist() == [32, 41, 32]
    assert plan.shared_tokens.tolist() == [0, 32, 32]
    assert plan.computed_tokens.tolist() == [32, 9, 1]


def test_an_empty_store_gives_an_empty_plan(stage_prompts: Stage) -> None:
    plan = make_plan(stage_prompts([]), prefix_sharing=True)
    assert plan.num_prompts == 0 and plan.reuse_ceiling == 0.0
