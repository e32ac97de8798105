"""The simulated load of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchllm.planner.demand import compact, simulate_demand
from batchllm.planner.plan import make_plan

Stage = Callable[..., Any]
HUGE_STEP = 1 << 40  # prompts take no time


def test_one_prompt_holds_its_tokens_and_what_it_generates(stage_prompts: Stage) -> None:
    plan = make_plan(stage_prompts([[1] * 40], [10]), prefix_sharing=True)
    demand = simulate_demand(plan, max_sequences=4, step_tokens=HUGE_STEP, read_chunk=16)
    assert demand.peak_live_tokens == 50
    assert demand.num_steps == pytest.approx(10)


def test_a_shared_run_is_held_once_and_freed_with_its_last_prompt(stage_prompts: Stage) -> None:
    plan = make_plan(stage_prompts([[1] * 100 + [i] for i in range(4)], [10] * 4), prefix_sharing=True)
    at_once = simulate_demand(plan, max_sequences=4, step_tokens=HUGE_STEP, read_chunk=16)
    assert at_once.peak_live_tokens == 100 + 4 * 11
    in_turn = simulate_demand(plan, max_sequences=1, step_tokens=HUGE_STEP, read_chunk=16)
    assert in_turn.peak_live_tokens == 100 + 11
    assert in_turn.num_steps == pytest.approx(40)


def test_equal_prompts_hold_their_tokens_once(stage_prompts: Stage) -> None:
    plan = make_plan(stage_prompts([[1] * 100] * 3, [10] * 3), prefix_sharing=True)
    demand = simulate_demand(plan, max_sequences=8, step_tokens=HUGE_STEP, read_chunk=16)
    assert demand.peak_live_tokens == 100 + 3 * 10


def test_prompt_tokens_take_what_a_step_has_left(stage_prompts: Stage) -> None:
    plan = make_plan(stage_prompts([[1] * 1000], [5]), prefix_sharing=True)
    demand = simulate_demand(plan, max_sequences=28, step_tokens=128, read_chunk=16)
    assert demand.num_steps == pytest.approx(1000 / 100 + 5)


@settings(max_examples=100, deadline=None)
@given(limits=st.lists(st.integers(1, 30), min_size=1, max_size=30), max_sequences=st.integers(1, 8))
def test_decode_work_is_conserved_and_never_wider_than_allowed(
    stage_prompts: Stage, limits: list[int], max_sequences: int
) -> None:
    plan = make_plan(stage_prompts([[i] for i in range(len(limits))], limits), prefix_sharing=True)
    demand = simulate_demand(plan, max_sequences=max_sequences, step_tokens=HUGE_STEP, read_chunk=16)
    assert float((demand.running * demand.duration).sum()) == pytest.approx(sum(limits), rel=1e-6)
    assert demand.running.max() <= max_sequences
    assert demand.peak_live_tokens <= max_sequences * (1 + max(limits))
    assert 0 <= demand.tail_share <= 1


def test_blending_ends_a_mixed_batch_sooner_than_token_order_or_longest_first(stage_prompts: Stage) -> None:
    random = np.random.default_rng(2)
    chatty = random.random(600) < 0.5
    prompts = [[int(i)] * (20 if long else 3000) for i, long in enumerate(chatty)]
    limits = np.where(chatty, 400, 10)
    plan = make_plan(stage_prompts(prompts, limits.tolist()), prefix_sharing=True)
    by_token = np.argsort(plan.order)
    longest_first = by_token[np.argsort(-limits, kind="stable")]

    def steps(positions: np.ndarray) -> float:
        reordered = dataclasses.replace(
            plan,
            order=plan.order[positions],
            shared_tokens=plan.shared_tokens[positions],
            prompt_tokens=plan.prompt_tokens[positions],
            decode_tokens=plan.decode_tokens[positions],
        )
        return simulate_demand(reordered, max_sequences=64, step_tokens=512, read_chunk=16).num_steps

    blended = steps(np.arange(600))
    assert blended <= steps(by_token)
    assert blended < 0.8 * steps(longest_first)


def test_an_empty_plan_demands_nothing(stage_prompts: Stage) -> None:
    plan = make_plan(stage_prompts([]), prefix_sharing=True)
    demand = simulate_demand(plan, max_sequences=4, step_tokens=64, read_chunk=16)
    assert (demand.peak_live_tokens, demand.num_steps, demand.tail_share) == (0, 0.0, 0.0)


def test_a_compacted_load_has_a_stretch_for_each_number_of_sequences_and_the_same_sums(stage_prompts: Stage) -> None:
    plan = make_plan(
        stage_prompts([[i] * (30 + i) for i in range(40)], [5 + i % 7 for i in range(40)]), prefix_sharing=True
    )
    demand = simulate_demand(plan, max_sequences=8, step_tokens=64, read_chunk=16)
    small = compact(demand)
    assert len(set(small.running.tolist())) == len(small.running) <= 9
    assert small.duration.sum() == pytest.approx(demand.duration.sum())
    for name in ("live_tokens", "read_tokens", "spared_tokens"):
        assert small.duration @ getattr(small, name) == pytest.approx(demand.duration @ getattr(demand, name))
    assert (small.peak_live_tokens, small.num_steps) == (demand.peak_live_tokens, demand.num_steps)


def test_a_shared_run_is_read_once_in_whole_chunks_and_steps_and_its_rest_by_each(stage_prompts: Stage) -> None:
    # Six chunks of 16, two steps of 2, and one token that each reads.
    plan = make_plan(stage_prompts([[1] * 101 + [i] for i in range(4)], [10] * 4), prefix_sharing=True)
    demand = simulate_demand(plan, max_sequences=4, step_tokens=HUGE_STEP, read_chunk=16)
    steps = demand.duration
    assert steps @ demand.read_tokens == pytest.approx(10 * (100 + 4 * (2 + 5)))
    assert steps @ demand.spared_tokens == pytest.approx(10 * 3 * 100)
    # One at a time there is nobody to read with.
    in_turn = simulate_demand(plan, max_sequences=1, step_tokens=HUGE_STEP, read_chunk=16)
    assert in_turn.duration @ in_turn.read_tokens == pytest.approx(4 * 10 * (102 + 5))
    assert in_turn.duration @ in_turn.spared_tokens == pytest.approx(0, abs=1e-3)


def test_a_short_shared_run_before_much_that_is_not_is_read_by_each(stage_prompts: Stage) -> None:
    def read_tokens(own: int) -> float:
        prompts = [[1] * 7 + [2 + i] * own for i in range(4)]
        demand = simulate_demand(
            make_plan(stage_prompts(prompts, [2] * 4), prefix_sharing=True),
            max_sequences=4,
            step_tokens=HUGE_STEP,
            read_chunk=16,
        )
        return float(demand.duration @ demand.read_tokens)

    # Within one chunk three steps of 2 are read together; of six chunks each would leave a partial.
    assert read_tokens(5) == pytest.approx(2 * (6 + 4 * (6 + 1)))
    assert read_tokens(80) == pytest.approx(2 * 4 * (87 + 1))


# The second reads too many chunks to share a front with the first.
@example(lengths=[2, 9], heads=[0] * 20, max_sequences=1)
@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    heads=st.lists(st.integers(0, 2), min_size=20, max_size=20),
    max_sequences=st.integers(1, 8),
)
def test_what_is_read_and_what_is_spared_add_up_to_what_each_would_read_alone(
    stage_prompts: Stage, lengths: list[int], heads: list[int], max_sequences: int
) -> None:
    prompts = [[heads[i]] * length + [100 + i] for i, length in enumerate(lengths)]
    plan = make_plan(stage_prompts(prompts, [7] * len(prompts)), prefix_sharing=True)
    demand = simulate_demand(plan, max_sequences=max_sequences, step_tokens=HUGE_STEP, read_chunk=16)
    read, spared = demand.duration @ demand.read_tokens, demand.duration @ demand.spared_tokens
    alone = sum(7 * (len(prompt) + 3.5) for prompt in prompts)
    assert read + spared == pytest.approx(alone, rel=1e-3)
    assert read <= alone * (1 + 1e-3)


def test_rows_in_input_order_read_alone_what_they_share_with_others_far_away(stage_prompts: Stage) -> None:
    prompts = [[i % 2] * 64 + [10 + i] for i in range(6)]
    plan = make_plan(stage_prompts(prompts, [10] * 6), prefix_sharing=True, keep_order=True)
    demand = simulate_demand(plan, max_sequences=6, step_tokens=HUGE_STEP, read_chunk=16)
    assert demand.duration @ demand.read_tokens == pytest.approx(10 * 6 * (65 + 5))
    assert not demand.spared_tokens.any()
    assert demand.peak_live_tokens == 2 * 64 + 6 * 11
