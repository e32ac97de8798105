"""Predicted beside actual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchllm.planner.analyze import Actual, compare_with_actual, comparison_text
from batchllm.planner.cost import Rates
from batchllm.planner.explain import EngineLimits, ModelFacts, explain
from batchllm.planner.plan import make_plan


def test_each_prediction_stands_beside_what_was_measured(stage_prompts: Callable[..., Any]) -> None:
    store = stage_prompts([[1] * 32 + [2], [1] * 32 + [3]], [10, 10])
    explanation = explain(
        make_plan(store, prefix_sharing=True),
        store,
        model=ModelFacts(num_layers=1, num_kv_heads=1, head_dim=8, kv_dtype_bytes=4, context_tokens=100),
        limits=EngineLimits(max_sequences=2, step_tokens=1 << 30, read_chunk=256),
        rates=Rates(
            prefill_tokens_per_s=34.0,
            prefill_pairs_per_s=1e30,
            decode_step_s=((1, 0.1), (2, 0.1)),
            kv_read_bytes_per_s=1e30,
            kv_spared_bytes_per_s=1e30,
            kv_found_bytes_per_s=1e30,
            kv_first_write_bytes_per_s=54 * 64 / 1.62,
            tiers=(),
        ),
        decode_text=str,
    )
    actual = Actual(
        computed_prompt_tokens=34,
        decode_tokens=10,
        num_steps=10,
        peak_live_tokens=54,
        prefill_s=4.0,
        decode_s=1.0,
        total_s=5.0,
    )
    rows = {row.name: row for row in compare_with_actual(explanation, actual)}
    assert rows["computed prompt tokens"].ratio == 1.0
    assert rows["generated tokens"].ratio == 0.5
    assert rows["prefill s"].predicted == pytest.approx(1.0)
    # 20 of the 54 tokens are generated: only their memory is found as they are written.
    assert rows["decode s"].predicted == pytest.approx(1.0 + 0.6)
    assert rows["total s"].ratio == pytest.approx(5.0 / 2.6)
    text = comparison_text(tuple(rows.values()))
    assert text.splitlines()[2].split() == ["generated", "tokens", "20", "10", "0.50"]
