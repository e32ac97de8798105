"""Predicted times from measured rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batchllm.planner.cost import PrefillWork, Rates, TierSpace, decode_step_s, predict, spread_over_tiers
from batchllm.planner.demand import simulate_demand
from batchllm.planner.plan import make_plan
from batchllm.planner.work import prompt_pairs

DEVICE = TierSpace(name="device", capacity_bytes=1000, bytes_per_s=1e9)
HOST = TierSpace(name="host", capacity_bytes=500, bytes_per_s=100.0)
RATES = Rates(
    prefill_tokens_per_s=100.0,
    prefill_pairs_per_s=1000.0,
    decode_step_s=((1, 0.1), (3, 0.3), (5, 0.4)),
    kv_found_bytes_per_s=2e5,
    kv_read_bytes_per_s=1e6,
    kv_spared_bytes_per_s=1e7,
    kv_first_write_bytes_per_s=1e4,
    tiers=(DEVICE, HOST),
)


def test_a_decode_step_is_linear_between_the_measured_batches_and_beyond() -> None:
    assert decode_step_s(np.array([1, 2, 4, 7]), rates=RATES).tolist() == pytest.approx([0.1, 0.2, 0.35, 0.5])


def test_each_phase_is_its_work_over_its_rate(stage_prompts: Callable[..., Any]) -> None:
    plan = make_plan(stage_prompts([[1] * 50, [2] * 50], [20, 20]), prefix_sharing=True)
    demand = simulate_demand(plan, max_sequences=1, step_tokens=1 << 40, read_chunk=16)
    work = PrefillWork(tokens=30, pairs=prompt_pairs(plan), found=500)
    prediction = predict(demand, prefill=work, rates=RATES, kv_bytes_per_token=20)
    assert prediction.prefill_s == pytest.approx(0.3 + 2 * (50 * 51 / 2) / 1000 + 500 * 20 / 2e5)
    assert prediction.decode_s == pytest.approx(40 * 0.1)
    assert prediction.attention_s == pytest.approx(40 * 60 * 20 / 1e6)
    # The peak of 70 tokens is 1,400 bytes, 400 more than the device holds; memory for 600 is found for the prompts beforehand.
    assert prediction.first_write_s == pytest.approx(400 / 1e4)
    assert prediction.transfer_s == pytest.approx(2 * 400 / 100.0)
    assert prediction.total_s == pytest.approx(2.9 + 4.0 + 0.048 + 0.04 + 8.0)
    assert prediction.bottleneck.startswith("moving keys and values between tiers (53%")


def test_what_sequences_read_together_is_read_once_and_multiplied_for_each(stage_prompts: Callable[..., Any]) -> None:
    plan = make_plan(stage_prompts([[1] * 41 + [i] for i in range(4)], [10] * 4), prefix_sharing=True)

    def attention_s(read_chunk: int) -> float:
        demand = simulate_demand(plan, max_sequences=4, step_tokens=1 << 40, read_chunk=read_chunk)
        work = PrefillWork(tokens=45, pairs=prompt_pairs(plan), found=123)
        return predict(demand, prefill=work, rates=RATES, kv_bytes_per_token=20).attention_s

    # 40 of the 41 shared tokens fill chunks and steps; each reads 2 tokens of its prompt and what it generates, 5 tokens on average.
    assert attention_s(16) == pytest.approx(10 * (40 + 4 * (2 + 5)) * 20 / 1e6 + 10 * 3 * 40 * 20 / 1e7)
    assert attention_s(400) == pytest.approx(10 * 4 * (42 + 5) * 20 / 1e6)


def test_tiers_fill_in_order_and_the_last_says_what_fits_nowhere() -> None:
    device, host = spread_over_tiers(1700, tiers=(DEVICE, HOST))
    assert (device.demand_bytes, device.missing_bytes) == (1000, 700)
    assert (host.demand_bytes, host.missing_bytes) == (500, 200)
