"""Advice: said where it matters, with the computed figure, and silent where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchllm.planner.advice import PlanFacts, PlanTotals, advise, reordered_saving, totals
from batchllm.planner.cost import PrefillWork, Rates, TierSpace, predict
from batchllm.planner.demand import simulate_demand
from batchllm.planner.plan import make_plan

Advise = Callable[..., tuple[str, ...]]


@pytest.fixture
def advice_for(stage_prompts: Callable[..., Any]) -> Advise:
    def work_out(
        prompts: list[list[int]],
        max_tokens: list[int] | None = None,
        *,
        context_tokens: int = 10_000,
        device_bytes: int = 1 << 40,
    ) -> tuple[str, ...]:
        plan = make_plan(stage_prompts(prompts, max_tokens), prefix_sharing=True)
        demand = simulate_demand(plan, max_sequences=8, step_tokens=1 << 30, read_chunk=256)
        rates = Rates(
            prefill_tokens_per_s=1e3,
            prefill_pairs_per_s=1e9,
            decode_step_s=((1, 0.1),),
            kv_read_bytes_per_s=1e9,
            kv_spared_bytes_per_s=1e9,
            kv_found_bytes_per_s=1e30,
            kv_first_write_bytes_per_s=1e9,
            tiers=(TierSpace(name="device", capacity_bytes=device_bytes, bytes_per_s=1e9),),
        )
        prefill = PrefillWork(tokens=int(plan.computed_tokens.sum()), pairs=0, found=0)
        prediction = predict(demand, prefill=prefill, rates=rates, kv_bytes_per_token=1)
        return advise(
            PlanFacts(
                plan=plan,
                demand=demand,
                prediction=prediction,
                context_tokens=context_tokens,
                max_sequences=8,
            )
        )

    return work_out


def test_a_plain_batch_gets_no_advice(advice_for: Advise) -> None:
    assert advice_for([[i] * 50 for i in range(16)]) == ()


def test_rows_that_fill_the_context_are_counted(advice_for: Advise) -> None:
    (remark,) = advice_for([[i] * 50 for i in range(8)] + [[99] * 64, [98] * 70], context_tokens=64)
    assert remark.startswith("2 prompts leave no room") and "longest has 70 tokens" in remark


def test_repeated_prompts_are_counted_beyond_the_first_of_each(advice_for: Advise) -> None:
    prompts = [[1, 2, 3]] * 3 + [[1, 2]] * 2 + [[1, 2, 3, 4], [7], [8], [9], [10]]
    assert advice_for(prompts) == ("3 prompts (30%) equal an earlier one, of another row or sample",)


def test_a_long_tail_names_the_longest_row(advice_for: Advise) -> None:
    (remark,) = advice_for([[i] for i in range(8)], [10] * 7 + [1000])
    assert "1,000 tokens" in remark


def test_a_demand_beyond_the_device_names_how_many_sequences_fit(advice_for: Advise) -> None:
    (remark,) = advice_for([[i] * 84 for i in range(8)], device_bytes=400)
    assert "holds 50% of the peak" in remark and "about 4 sequences" in remark


def test_a_better_rendering_states_its_saving() -> None:
    original, alternative = PlanTotals(10_000, 10_000), PlanTotals(10_000, 3_900)
    assert reordered_saving(original, alternative, change="moving {{ date }} behind the document") == (
        "moving {{ date }} behind the document would cut computed prompt tokens by 61% (10,000 to 3,900)"
    )
    assert reordered_saving(alternative, original, change="the reverse") is None
    assert reordered_saving(PlanTotals(0, 0), alternative, change="nothing") is None


def test_totals_of_a_plan_count_shared_tokens_once(stage_prompts: Callable[..., Any]) -> None:
    plan = make_plan(stage_prompts([[1, 2, 3], [1, 2, 4]]), prefix_sharing=True)
    assert totals(plan) == PlanTotals(prompt_tokens=6, unique_prompt_tokens=4)
