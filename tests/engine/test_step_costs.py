"""What steps cost, and whether drafts have paid."""

from __future__ import annotations

import numpy as np
import pytest

from batchllm.engine.step_costs import StepCosts

FIXED, ROW, READ = 0.015, 0.0002, 2e-6


def true_seconds(rows: int, reads: int) -> float:
    return FIXED + ROW * rows + READ * reads


def observe(costs: StepCosts, sequences: int, rows: int, *, context: int = 200, seconds: float = 0.0) -> None:
    reads = sequences * context
    costs.observe(
        num_sequences=sequences,
        num_rows=rows,
        num_tokens=rows,
        num_reads=reads,
        seconds=seconds or true_seconds(rows, reads),
    )


def test_a_drafted_row_costs_its_products_and_a_sequence_what_it_reads_too() -> None:
    costs = StepCosts()
    for rows in (256, 256, 256 + 190, 256 + 320, 256, 240 + 100, 230):
        observe(costs, min(rows, 256), rows)
    found = costs.seconds(np.array([128, 256]), num_sequences=128)
    assert found == pytest.approx([true_seconds(128, 128 * 200), true_seconds(256, 128 * 200)], rel=0.1)
    # As many sequences as that cost half as much again.
    assert costs.seconds(np.array([256]), num_sequences=256)[0] > 1.4 * found[1]


def test_before_a_draft_was_seen_a_row_is_taken_to_cost_what_a_prompt_row_does() -> None:
    costs = StepCosts()
    costs.observe_prompts(num_rows=2000, seconds=0.2)
    for sequences in (256, 250, 240, 256):
        observe(costs, sequences, sequences)
    plain, drafted = costs.seconds(np.array([256, 456]), num_sequences=256)
    assert plain == pytest.approx(true_seconds(256, 256 * 200), rel=0.03)
    assert drafted - plain == pytest.approx(200 * 0.0001, rel=0.3)


def test_costs_never_fall_with_more_rows() -> None:
    costs = StepCosts()
    for rows, seconds in ((4, 1.0), (16, 3.0), (64, 2.0), (16, 3.0)):
        observe(costs, rows, rows, seconds=seconds)
    found = costs.seconds(np.arange(1, 500), num_sequences=4)
    assert (np.diff(found) >= 0).all() and found[-1] > found[0] > 0


def test_a_size_that_costs_more_than_its_neighbours_is_known_to() -> None:
    """Products come in tiles: a row more can cost a step."""
    costs = StepCosts()
    for _ in range(4):
        for rows, seconds in ((12, 1.0), (16, 1.0), (24, 1.5), (32, 1.5)):
            observe(costs, 4, rows, seconds=seconds)
    found = costs.seconds(np.array([12, 16, 24, 32]), num_sequences=4)
    assert found == pytest.approx([1.0, 1.0, 1.5, 1.5], rel=0.07)


def test_a_disturbed_step_says_nothing_and_two_in_turn_that_the_machine_is_slower() -> None:
    costs = StepCosts()
    for _ in range(10):
        observe(costs, 100, 100)
    plain = costs.seconds(np.array([100]), num_sequences=100)[0]
    observe(costs, 100, 100, seconds=5 * plain)
    observe(costs, 100, 100)
    assert costs.seconds(np.array([100]), num_sequences=100)[0] == pytest.approx(plain)
    for _ in range(20):
        observe(costs, 100, 100, seconds=2 * plain)
    assert costs.seconds(np.array([100]), num_sequences=100)[0] == pytest.approx(2 * plain, rel=0.05)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    costs = StepCosts()
    for _ in range(9):
        observe(costs, 30, 30, seconds=9.0)
    for _ in range(1200):
        observe(costs, 64, 64, seconds=1.0)
    assert costs.seconds(np.array([30]), num_sequences=64)[0] <= 1.0


def lossy(costs: StepCosts, *, seconds: float) -> None:
    """Four sequences and 16 drafts, none right."""
    costs.observe(num_sequences=4, num_rows=20, num_tokens=4, num_reads=800, seconds=seconds)


def test_drafting_stops_when_it_has_lost_a_hundredth_and_goes_on_when_more_time_has_passed() -> None:
    costs = StepCosts()
    assert not costs.may_draft, "no plain step to compare with"
    observe(costs, 4, 4, seconds=1.0)
    assert not costs.may_draft, "one alone may have been disturbed"
    for _ in range(99):
        observe(costs, 4, 4, seconds=1.0)
    assert costs.may_draft
    for _ in range(2):
        lossy(costs, seconds=1.6)
    assert not costs.may_draft, "1.2 seconds of a hundred were lost"
    for _ in range(30):
        observe(costs, 4, 4, seconds=1.0)
    assert costs.may_draft


def test_one_disturbed_step_is_no_loss_by_drafts() -> None:
    costs = StepCosts()
    for _ in range(100):
        observe(costs, 4, 4, seconds=1.0)
    for seconds in (1.0, 1.0, 50.0, 1.0, 1.0):
        lossy(costs, seconds=seconds)
    assert costs.may_draft


def test_a_machine_that_has_become_slower_is_no_loss_by_drafts() -> None:
    costs = StepCosts()
    for _ in range(30):
        observe(costs, 100, 100)
    for _ in range(3):
        observe(costs, 100, 100, seconds=1.8 * true_seconds(100, 20_000))
    for _ in range(5):
        observe(costs, 100, 140, seconds=1.8 * true_seconds(140, 20_000))
    assert costs.may_draft, "40 % more tokens for 11 % more time"
    for _ in range(5):
        observe(costs, 100, 140, seconds=1.8 * 1.6 * true_seconds(140, 20_000))
    assert not costs.may_draft, "40 % more tokens for 78 % more time"
