"""The rate at which prompt rows are computed, beside what their steps cost anyway."""

from __future__ import annotations

import pytest

from batchllm.engine.bookkeeping import measure_block_s
from batchllm.engine.prefill_cost import PrefillCost
from batchllm.storage.cost import CostTable, Rate


def test_what_a_step_costs_without_prompt_rows_is_not_theirs() -> None:
    costs = CostTable({})
    prefill = PrefillCost(costs)
    prefill.plain_s.extend([0.3, 0.3, 9.0])
    prefill.observe(num_prefill=600, seconds=0.9)
    assert costs.rates[Rate.PREFILL] == pytest.approx(600 / 0.6)


def test_few_rows_are_counted_together_before_they_say_anything() -> None:
    costs = CostTable({})
    prefill = PrefillCost(costs)
    prefill.plain_s.append(1.0)
    for _ in range(10):
        prefill.observe(num_prefill=50, seconds=1.25)
    assert Rate.PREFILL not in costs.rates
    prefill.observe(num_prefill=50, seconds=1.25)
    assert costs.rates[Rate.PREFILL] == pytest.approx(200.0)


def test_rows_that_add_nothing_to_their_steps_are_cheaper_to_compute_than_to_move() -> None:
    costs = CostTable({Rate.COPY_OUT: 1e10, Rate.COPY_IN: 1e10})
    prefill = PrefillCost(costs)
    prefill.plain_s.append(1.0)
    prefill.observe(num_prefill=600, seconds=0.99)
    assert costs.recompute_s(16) < costs.host_s(4096)


def test_the_books_of_a_block_cost_microseconds() -> None:
    assert 2e-6 < measure_block_s() < 5e-3
