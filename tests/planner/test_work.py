"""The least work of a plan, counted again prompt by prompt and step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner.plan import Plan, make_plan
from batchllm.planner.store import PromptStore
from batchllm.planner.work import PlanWork, plan_work, prompt_pairs
from batchllm.prompt import SamplingParams


def planned(folder: Path, prompts: list[list[int]], *, keep_order: bool = False) -> tuple[Plan, list[list[int]]]:
    """A plan, and the prompts in its order."""
    store = PromptStore(folder)
    number = store.intern_sampling(SamplingParams(max_tokens=99))
    store.append_batch(
        row_index=np.arange(len(prompts)),
        lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        tokens=np.concatenate([np.array(prompt, dtype=np.int32) for prompt in prompts]),
        sampling_ids=np.full(len(prompts), number, dtype=np.int32),
    )
    store.finish()
    plan = make_plan(store, prefix_sharing=True, keep_order=keep_order)
    store.close()
    return plan, [prompts[number] for number in plan.order]


def prefixes(prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Every distinct prefix, and which prompts have it: each is one token that must be computed."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        for stop in range(1, len(prompt) + 1):
            found.setdefault(tuple(prompt[:stop]), []).append(number)
    return found


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=8),
    data=st.data(),
    keep_order=st.booleans(),
)
def test_work_equals_a_count_over_distinct_prefixes(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]], data: st.DataObject, keep_order: bool
) -> None:
    plan, ordered = planned(tmp_path_factory.mktemp("store"), prompts, keep_order=keep_order)
    generated = data.draw(st.lists(st.integers(0, 9), min_size=len(prompts), max_size=len(prompts)))
    width = data.draw(st.integers(1, 4))

    work = plan_work(plan, generated_tokens=np.array(generated), max_sequences=width)

    answered = [prompt for prompt, count in zip(ordered, generated, strict=True) if count]
    decoded = [count - 1 for count in generated if count]
    shared = prefixes(answered)
    expected_reads = sum(count * (count + 1) // 2 for count in decoded)
    for owners in prefixes(ordered).values():
        steps = [max(generated[owner] - 1, 0) for owner in owners]
        if len(owners) == 1:
            expected_reads += steps[0]
        elif any(generated[owner] for owner in owners):
            expected_reads += max(max(steps), sum(steps) / width)
    assert work.prompt_tokens == len(shared)
    assert work.prompt_pairs == sum(map(len, shared))
    assert prompt_pairs(plan) == sum(map(len, prefixes(ordered)))
    assert (work.num_samples, work.decode_tokens) == (len(answered), sum(decoded))
    assert work.decode_pairs == sum(
        sum(len(prompt) + number for number in range(1, count + 1))
        for prompt, count in zip(answered, decoded, strict=True)
    )
    assert work.decode_steps == pytest.approx(max([0, *decoded, sum(decoded) / width]))
    assert work.kv_tokens_read == pytest.approx(expected_reads)


def test_work_of_two_plans_adds_up(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, [[1, 2], [1, 3]])
    work = plan_work(plan, generated_tokens=np.array([2, 5]), max_sequences=2)
    both = PlanWork().plus(work).plus(work)
    assert (both.prompt_tokens, both.num_samples, both.decode_steps) == (6, 4, 8.0)
