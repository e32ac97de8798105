from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from batchllm.storage.cost import CostTable, Decision, Rate, Victim, measure_copy, measure_disk

RATES = {
    Rate.PREFILL: 1_000.0,
    Rate.COPY_OUT: 10e9,
    Rate.COPY_IN: 10e9,
    Rate.DISK_WRITE: 2e9,
    Rate.DISK_READ: 2e9,
}
BLOCK = Victim(block_bytes=2_000_000, recompute_tokens=16, next_use_s=10.0)


def test_a_cheap_move_beats_recomputing_and_memory_beats_disk() -> None:
    table = CostTable(RATES)
    assert table.host_s(2_000_000) == pytest.approx(0.0004)
    assert table.disk_s(2_000_000) == pytest.approx(0.0024)
    assert table.decide(BLOCK, has_host=True, has_disk=True) is Decision.HOST
    assert table.decide(BLOCK, has_host=False, has_disk=True) is Decision.DISK


def test_a_tier_that_does_not_pay_is_not_used() -> None:
    table = CostTable({**RATES, Rate.PREFILL: 1e6})  # 16 tokens in 16 microseconds
    assert table.decide(BLOCK, has_host=True, has_disk=True) is Decision.DROP


def test_a_long_chain_to_recompute_can_make_the_same_tier_pay() -> None:
    table = CostTable({**RATES, Rate.PREFILL: 1e6})
    victim = Victim(block_bytes=2_000_000, recompute_tokens=4096, next_use_s=10.0)
    assert table.decide(victim, has_host=False, has_disk=True) is Decision.DISK


def test_a_block_that_is_never_needed_again_is_dropped() -> None:
    victim = Victim(block_bytes=1, recompute_tokens=10**6, next_use_s=math.inf)
    assert CostTable(RATES).decide(victim, has_host=True, has_disk=True) is Decision.DROP


def test_a_block_that_is_needed_before_it_could_be_back_waits() -> None:
    victim = Victim(block_bytes=2_000_000, recompute_tokens=16, next_use_s=0.0001)
    assert CostTable(RATES).decide(victim, has_host=True, has_disk=True) is Decision.WAIT


def test_without_any_tier_the_block_is_dropped() -> None:
    assert CostTable(RATES).decide(BLOCK, has_host=False, has_disk=False) is Decision.DROP


def test_an_unknown_rate_rules_its_tier_out() -> None:
    table = CostTable({Rate.PREFILL: 1_000.0, Rate.COPY_OUT: 10e9, Rate.COPY_IN: 10e9})
    assert table.decide(BLOCK, has_host=False, has_disk=True) is Decision.DROP
    assert table.decide(BLOCK, has_host=True, has_disk=True) is Decision.HOST


def test_a_block_that_costs_more_to_name_and_book_than_to_compute_again_is_dropped() -> None:
    rates = {**RATES, Rate.PREFILL: 400_000.0}  # 16 tokens in 40 microseconds
    tiny = Victim(block_bytes=16_384, recompute_tokens=16, next_use_s=10.0)
    for block_s, expected in ((0.0, Decision.HOST), (20e-6, Decision.HOST), (30e-6, Decision.DROP)):
        assert CostTable(rates, block_s=block_s).decide(tiny, has_host=True, has_disk=True) is expected
    assert CostTable(rates, block_s=1e-3).disk_s(2_000_000) == pytest.approx(0.0034)


def test_the_middle_one_of_the_latest_observations_counts() -> None:
    table = CostTable(RATES)
    for seconds in (1.0, 50.0, 1.0, 2.0, 1.0):
        table.observe(Rate.DISK_READ, amount=1e9, seconds=seconds)
    assert table.rates[Rate.DISK_READ] == pytest.approx(1e9)
    for _ in range(9):
        table.observe(Rate.DISK_READ, amount=1e9, seconds=4.0)
    assert table.rates[Rate.DISK_READ] == pytest.approx(0.25e9)
    table.observe(Rate.DISK_READ, amount=0, seconds=1.0)
    assert table.rates[Rate.DISK_READ] == pytest.approx(0.25e9)


def test_of_two_observations_the_faster_one_counts_because_first_steps_are_slow() -> None:
    table = CostTable({})
    table.observe(Rate.PREFILL, amount=100, seconds=2.0)
    assert table.rates[Rate.PREFILL] == 50
    table.observe(Rate.PREFILL, amount=100, seconds=1.0)
    assert table.rates[Rate.PREFILL] == 100


@pytest.mark.parametrize("rates", [{Rate.PREFILL: 0.0}, {Rate.DISK_READ: -1.0}])
def test_a_rate_that_is_not_above_zero_is_refused(rates: dict[Rate, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        CostTable(rates)


def test_measuring_the_machine_takes_less_than_two_seconds(tmp_path: Path) -> None:
    began_s = time.monotonic()
    copy_rate = measure_copy(block_bytes=368_640)
    write_rate, read_rate = measure_disk(tmp_path, block_bytes=368_640)
    assert time.monotonic() - began_s < 2.0
    assert copy_rate > 1e8 and write_rate > 1e6 and read_rate > 1e6
    assert list(tmp_path.iterdir()) == []
