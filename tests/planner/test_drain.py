"""Batches whose lengths are certain end together, where that costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner.demand import Demand, simulate_demand
from batchllm.planner.drain import EngineWidth, Width, ends_by_length, outlook
from batchllm.planner.plan import Plan, make_plan
from batchllm.prompt import Grammar, SamplingParams

Stage = Callable[..., Any]
ENGINE = EngineWidth(Width(most=256, fewest=16), step_tokens=2048)


def load_of(plan: Plan, engine: EngineWidth = ENGINE) -> Demand:
    width = min(plan.width.most if plan.width else engine.width.most, plan.num_prompts)
    return simulate_demand(plan, max_sequences=width, step_tokens=engine.step_tokens, read_chunk=256)


def heavy_tailed(num_rows: int, seed: int = 4) -> tuple[list[list[int]], list[int]]:
    """Short prompts that share nothing, most completions short and a few of 512."""
    random = np.random.default_rng(seed)
    lengths = np.clip(np.rint(np.exp(random.normal(np.log(48), 1.0, num_rows))), 8, 512).astype(int)
    return [[100 + row, *[5] * 60] for row in range(num_rows)], [512, *lengths[1:].tolist()]


def both_plans(
    stage: Stage, batch: tuple[list[list[int]], list[int]], engine: EngineWidth = ENGINE
) -> tuple[Plan, Plan]:
    """The usual plan, and that of an engine of such a width."""
    store = stage(*batch, ignore_eos=True)
    return make_plan(store, prefix_sharing=True), make_plan(store, prefix_sharing=True, engine=engine)


def test_a_heavy_tailed_batch_runs_as_few_at_once_as_end_with_its_longest_row(stage_prompts: Stage) -> None:
    prompts, lengths = heavy_tailed(192)
    usual, drained = both_plans(stage_prompts, (prompts, lengths))
    assert sum(lengths) / 512 == pytest.approx(31.3, abs=0.1)
    assert usual.width is None and drained.width == Width(most=32, fewest=16)
    before, after = load_of(usual), load_of(drained)
    assert before.tail_share > 0.7 and after.tail_share < 0.12
    assert after.num_steps <= 1.005 * before.num_steps
    assert drained.decode_tokens.tolist() == sorted(lengths, reverse=True)


def test_the_width_is_the_tokens_of_all_over_those_of_the_longest(stage_prompts: Stage) -> None:
    lengths = [400] * 20 + [100] * 80
    usual, drained = both_plans(stage_prompts, ([[row + 1] for row in range(100)], lengths))
    assert (usual.width, drained.width) == (None, Width(most=40, fewest=16))
    assert load_of(drained).num_steps == pytest.approx(400, abs=1)
    assert load_of(drained).tail_share < 0.001 and load_of(usual).tail_share == pytest.approx(0.75, abs=0.01)


def test_one_row_that_is_far_too_long_narrows_nothing(stage_prompts: Stage) -> None:
    """299 rows of 50 tokens, run beside one of 2,000 a few at a time, would only be read more often."""
    batch = ([[row + 1, *[5] * 40] for row in range(300)], [50] * 299 + [2000])
    usual, drained = both_plans(stage_prompts, batch)
    assert drained.width is None and drained.order.tolist() == usual.order.tolist()


def test_longest_first_is_not_taken_where_it_starves_prompts(stage_prompts: Stage) -> None:
    chatty = np.random.default_rng(2).random(600) < 0.5
    batch = (
        [[row + 1] * (20 if long else 3000) for row, long in enumerate(chatty)],
        np.where(chatty, 400, 10).tolist(),
    )
    engine = EngineWidth(Width(most=64, fewest=8), step_tokens=512)
    usual, drained = both_plans(stage_prompts, batch, engine)
    assert drained.width is None and drained.order.tolist() == usual.order.tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, ignore_eos=True, stop=("a",)),
        SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(4,)),
        SamplingParams(max_tokens=9, ignore_eos=True, grammar=Grammar(kind="regex", text="start: /a+/")),
    ],
    ids=["eos", "stop", "stop id", "grammar"],
)
def test_a_row_that_more_than_its_length_can_end_leaves_the_order_as_it_is(
    stage_prompts: Stage, params: SamplingParams
) -> None:
    assert ends_by_length(replace(params, ignore_eos=True, stop=(), stop_token_ids=(), grammar=None))
    assert not ends_by_length(params)
    prompts, lengths = heavy_tailed(192)
    store = stage_prompts(prompts, lengths, ignore_eos=True)
    assert make_plan(store, prefix_sharing=True, engine=ENGINE).width == Width(most=32, fewest=16)
    store.sampling.append(params)
    assert make_plan(store, prefix_sharing=True, engine=ENGINE).width is None


def test_rows_in_input_order_stay_there_and_a_named_width_too(stage_prompts: Stage) -> None:
    prompts, lengths = heavy_tailed(192)
    store = stage_prompts(prompts, lengths, ignore_eos=True)
    kept = make_plan(store, prefix_sharing=True, keep_order=True, engine=ENGINE)
    assert kept.width is None and kept.order.tolist() == list(range(192))
    named = make_plan(store, prefix_sharing=True, engine=EngineWidth(Width(most=32, fewest=32), step_tokens=2048))
    assert named.width in (None, Width(most=32, fewest=32))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 8, 20, 60, 200, 512]), min_size=1, max_size=60),
    heads=st.lists(st.integers(1, 3), min_size=60, max_size=60),
    sizes=st.lists(st.sampled_from([0, 5, 400, 1500]), min_size=60, max_size=60),
    engine=st.sampled_from([EngineWidth(Width(16, 2), 64), EngineWidth(Width(64, 8), 512), ENGINE]),
)
def test_no_batch_takes_more_steps_or_computes_more_and_nodes_stay_whole(
    stage_prompts: Stage, lengths: list[int], heads: list[int], sizes: list[int], engine: EngineWidth
) -> None:
    prompts = [[heads[row]] * 40 + [10 + row] * (1 + sizes[row]) for row in range(len(lengths))]
    usual, drained = both_plans(stage_prompts, (prompts, lengths), engine)
    before, after = load_of(usual, engine), load_of(drained, engine)
    assert after.num_steps <= 1.006 * before.num_steps
    assert after.tail_share <= before.tail_share + 1e-9
    assert drained.unique_prompt_tokens == usual.unique_prompt_tokens
    assert sorted(drained.order.tolist()) == list(range(len(lengths)))
    planned = [prompts[row] for row in drained.order]
    for first, last, end in zip(drained.tree.first, drained.tree.last, drained.tree.end, strict=True):
        assert len({tuple(tokens[:end]) for tokens in planned[first:last]}) == 1


def test_an_outlook_counts_what_runs_as_a_plans_load_does(stage_prompts: Stage) -> None:
    prompts, lengths = heavy_tailed(100)
    plan = make_plan(stage_prompts(prompts, lengths, ignore_eos=True), prefix_sharing=True)
    load = simulate_demand(plan, max_sequences=64, step_tokens=512, read_chunk=256)
    found = outlook(
        computed_tokens=plan.computed_tokens, decode_tokens=plan.decode_tokens, max_sequences=64, step_tokens=512
    )
    assert found.num_steps == pytest.approx(load.num_steps, rel=1e-3)
    assert found.tail_share == pytest.approx(load.tail_share, abs=1e-3)
