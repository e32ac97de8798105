"""What is drafted, for whom, and when it stops paying."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.engine.drafts import Drafter, look_up
from batchllm.engine.sequences import SequenceTable
from batchllm.engine.step_costs import StepCosts


def drafted(tokens: list[int], most: int) -> list[int]:
    return look_up(np.array(tokens, dtype=np.int32), most=most).tolist()


def test_a_draft_is_what_followed_the_same_three_tokens_before() -> None:
    assert drafted([5, 1, 2, 3, 7, 8, 9, 1, 2, 3], most=3) == [7, 8, 9]
    assert drafted([5, 1, 2, 3, 7, 8, 9, 0, 2, 3], most=3) == [], "two tokens alone are no match"
    assert drafted([1, 2, 3], most=3) == []
    assert drafted([1, 2, 3, 7, 1, 2, 3], most=0) == []


def test_of_several_places_the_longest_match_counts_and_then_the_latest() -> None:
    assert drafted([9, 1, 2, 3, 7, 8, 1, 2, 3, 6, 9, 1, 2, 3], most=1) == [7]
    assert drafted([8, 1, 2, 3, 7, 5, 1, 2, 3, 6, 4, 1, 2, 3], most=1) == [6]


def test_a_text_that_repeats_itself_is_drafted_in_circles() -> None:
    assert drafted([4, 4, 4, 4], most=5) == [4, 4, 4, 4, 4]
    assert drafted([1, 2, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 6))
def test_a_draft_stands_in_the_text_behind_a_match_of_its_end(tokens: list[int], most: int) -> None:
    draft = drafted(tokens, most)
    if not draft:
        matches = [i for i in range(len(tokens) - 3) if tokens[i : i + 3] == tokens[-3:]]
        assert most == 0 or not matches
        return
    assert len(draft) == most
    whole = tokens + draft
    periods = range(1, len(tokens) - 2)
    assert any(
        all(whole[-1 - i] == whole[-1 - i - period] for i in range(most + 3))
        for period in periods
        if period + most + 3 <= len(whole)
    )


def known_costs(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_rows, value in seconds.items():
        costs.observe(num_sequences=num_rows, num_rows=num_rows, num_tokens=num_rows, seconds=value)
    return costs


def test_costs_lie_between_known_sizes_and_never_fall_with_more_rows() -> None:
    costs = known_costs({4: 1.0, 16: 3.0, 64: 2.0})
    found = costs.seconds(np.array([1, 4, 8, 16, 64, 500]))
    assert found[0] == found[1] == 1.0
    assert 1.0 < found[2] < 3.0
    assert found[3:].tolist() == [3.0, 3.0, 3.0]


def test_the_middle_of_the_latest_steps_counts() -> None:
    costs = StepCosts()
    for seconds in (50.0, *[1.0] * 9, 70.0, 80.0):
        costs.observe(num_sequences=4, num_rows=4, num_tokens=4, seconds=seconds)
    assert costs.seconds(np.array([4])).tolist() == [1.0]


def test_drafting_stops_when_it_has_lost_a_hundredth_and_goes_on_when_more_time_has_passed() -> None:
    costs = StepCosts()
    assert not costs.may_draft, "no plain step to compare with"
    for _ in range(100):
        costs.observe(num_sequences=4, num_rows=4, num_tokens=4, seconds=1.0)
    assert costs.may_draft
    costs.observe(num_sequences=4, num_rows=20, num_tokens=4, seconds=4.0)
    assert not costs.may_draft, "three seconds of a hundred were lost"
    for _ in range(250):
        costs.observe(num_sequences=4, num_rows=4, num_tokens=4, seconds=1.0)
    assert costs.may_draft


def running(num_sequences: int) -> SequenceTable:
    """Sequences whose texts repeat themselves."""
    table = SequenceTable(max_sequences=num_sequences, max_blocks=4, max_context=200)
    for number in range(num_sequences):
        tokens = np.array([1, 2, 3, 4] * 5, dtype=np.int32)
        table.add(position=number, rank=number, tokens=tokens, prompt_length=10, max_tokens=100)
    return table


def propose(drafter: Drafter, table: SequenceTable, *, num_rows: int = 500, num_prefill: int = 0) -> list[int]:
    slots = table.running
    limits = (table.max_tokens - table.num_tokens)[slots] - 1
    found = drafter.propose(slots, limits=limits, num_rows=num_rows, num_prefill=num_prefill)
    return [0] * slots.size if found is None else found.counts.tolist()


def drafter_for(table: SequenceTable, seconds: dict[int, float]) -> Drafter:
    drafter = Drafter(table, always=None)
    for slot in table.running.tolist():
        drafter.add(slot, can_draft=True)
    for num_rows, value in seconds.items():
        drafter.note_step(num_sequences=num_rows, num_rows=num_rows, num_tokens=num_rows, seconds=value)
    return drafter


def test_rows_that_cost_nothing_are_drafted_and_rows_that_cost_their_share_are_not() -> None:
    table = running(4)
    assert all(count > 0 for count in propose(drafter_for(table, {4: 1.0, 64: 1.01}), table))
    assert propose(drafter_for(table, {4: 1.0, 64: 16.0}), table) == [0] * 4


def test_now_and_then_a_step_goes_without_drafts_so_that_its_cost_stays_known() -> None:
    table = running(2)
    drafter = drafter_for(table, {2: 1.0, 64: 1.0})
    plain = [number for number in range(100) if not any(propose(drafter, table))]
    assert plain == [32, 65, 98]


def test_a_wide_batch_for_which_drafts_do_not_pay_is_asked_again_after_some_steps() -> None:
    table = running(40)
    drafter = drafter_for(table, {40: 1.0, 640: 16.0})
    assert propose(drafter, table) == [0] * 40
    for _ in range(9):
        drafter.note_step(num_sequences=640, num_rows=640, num_tokens=640, seconds=1.0)
    drafted = [any(propose(drafter, table)) for _ in range(10)]
    assert drafted == [False] * 8 + [True] * 2


def test_in_a_wide_batch_rows_without_a_match_are_searched_ever_more_seldom() -> None:
    table = running(40)
    table.tokens[0, :20] = np.arange(100, 120)
    drafter = drafter_for(table, {40: 1.0, 640: 1.0})
    drafted = []
    for number in range(20):
        if number == 12:
            # From here on row 0 repeats itself, too.
            table.tokens[0, :20] = [1, 2, 3, 4] * 5
        drafted.append(propose(drafter, table)[0] > 0)
    # Searched at 0, 2, 5, 10 and then 19.
    assert drafted == [False] * 19 + [True]


def test_nothing_is_drafted_beside_a_prompt_or_for_a_row_that_keeps_books() -> None:
    table = running(3)
    drafter = drafter_for(table, {3: 1.0, 48: 1.0})
    assert propose(drafter, table, num_prefill=1) == [0, 0, 0]
    drafter.add(1, can_draft=False)
    counts = propose(drafter, table)
    assert counts[1] == 0 and counts[0] > 0 and counts[2] > 0


def test_rows_whose_drafts_fail_get_none_and_those_that_do_well_get_more() -> None:
    table = running(3)
    drafter = drafter_for(table, {3: 1.0, 48: 3.0})
    for _ in range(5):
        drafter.note(np.array([0, 1]), num_drafted=np.array([5, 5]), num_accepted=np.array([0, 5]))
    bad, good, unknown = propose(drafter, table)
    assert bad == 0 and good > unknown


def test_a_row_that_failed_is_tried_again_after_a_while() -> None:
    table = running(1)
    drafter = drafter_for(table, {1: 1.0, 16: 1.0})
    for _ in range(5):
        drafter.note(np.array([0]), num_drafted=np.array([5]), num_accepted=np.array([0]))
    assert propose(drafter, table) == [0]
    assert any(propose(drafter, table) != [0] for _ in range(200))


@pytest.mark.parametrize("always", [None, 7])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 9])
def test_drafts_keep_to_the_rows_that_the_step_has_left(always: int | None, num_rows: int) -> None:
    table = running(3)
    drafter = drafter_for(table, {3: 1.0, 48: 1.0}) if always is None else Drafter(table, always=always)
    for slot in range(3):
        drafter.add(slot, can_draft=True)
    assert sum(propose(drafter, table, num_rows=num_rows)) == num_rows
