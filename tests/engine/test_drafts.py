"""What is drafted, for whom, and when it stops paying."""

from __future__ import annotations

import numpy as np
import pytest

from batchllm.engine.drafts import Drafter
from batchllm.engine.sequences import SequenceTable


def running(num_sequences: int) -> SequenceTable:
    """Sequences whose texts repeat themselves."""
    table = SequenceTable(max_sequences=num_sequences, max_blocks=4, max_tokens=200)
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
        # Twice: what was seen once may be a disturbance.
        for _ in range(2):
            note_plain(drafter, num_rows, value)
    return drafter


def note_plain(drafter: Drafter, num_rows: int, seconds: float) -> None:
    drafter.note_step(
        num_sequences=num_rows, num_rows=num_rows, num_tokens=num_rows, num_reads=0, num_prefill=0, seconds=seconds
    )


def test_rows_that_cost_nothing_are_drafted_and_rows_that_cost_their_share_are_not() -> None:
    table = running(4)
    assert all(count > 0 for count in propose(drafter_for(table, {4: 1.0, 64: 1.01}), table))
    assert propose(drafter_for(table, {4: 1.0, 64: 16.0}), table) == [0] * 4


def test_now_and_then_a_step_goes_without_drafts_so_that_its_cost_stays_known() -> None:
    table = running(2)
    drafter = drafter_for(table, {2: 1.0, 64: 1.0})
    plain = [number for number in range(170) if not any(propose(drafter, table))]
    assert plain == [2, 7, 16, 33, 66, 99, 132, 165]


def test_a_wide_batch_for_which_drafts_do_not_pay_is_asked_again_after_some_steps() -> None:
    table = running(40)
    drafter = drafter_for(table, {40: 1.0, 640: 17.0})
    assert propose(drafter, table) == [0] * 40
    for _ in range(9):
        note_plain(drafter, 640, 1.0)
    drafted = [any(propose(drafter, table)) for _ in range(10)]
    assert drafted == [False] * 8 + [True] * 2


def test_of_a_wide_batch_the_rows_with_a_match_are_drafted_and_soon_those_that_come_to_have_one() -> None:
    table = running(40)
    table.tokens[0, :20] = np.arange(100, 120)
    drafter = drafter_for(table, {40: 1.0, 640: 1.0})
    counts = propose(drafter, table)
    assert counts[0] == 0 and min(counts[1:]) > 0
    table.tokens[0, :20] = [1, 2, 3, 4] * 5
    assert propose(drafter, table)[0] > 0


def test_a_longer_match_is_trusted_more_and_a_run_learns_how_far() -> None:
    table = running(2)
    # Three tokens match, where the other row's text matches in eight and more.
    table.tokens[1, :20] = [1, 2, 3, *range(50, 64), 1, 2, 3]
    seconds = {2: 1.0, 32: 4.0}
    long, short = propose(drafter_for(table, seconds), table)
    assert long > short > 0
    drafter = drafter_for(table, seconds)
    for _ in range(20):
        propose(drafter, table)
        # Rows that come and go: what is learnt is not of one of them.
        drafter.note(np.array([0, 1]), num_drafted=np.array([5, 5]), num_accepted=np.array([0, 5]))
        for slot in (0, 1):
            drafter.add(slot, can_draft=True)
    drafter.note_step(num_sequences=2, num_rows=2, num_tokens=2, num_reads=0, num_prefill=0, seconds=1.0)
    long, short = next(counts for counts in iter(lambda: propose(drafter, table), None) if any(counts))
    assert short > long


def test_nothing_is_drafted_beside_a_prompt_or_for_a_row_that_keeps_books() -> None:
    table = running(3)
    drafter = drafter_for(table, {3: 1.0, 48: 1.0})
    assert propose(drafter, table, num_prefill=1) == [0, 0, 0]
    drafter.add(1, can_draft=False)
    counts = propose(drafter, table)
    assert counts[1] == 0 and counts[0] > 0 and counts[2] > 0


def test_rows_whose_drafts_fail_get_none_and_those_that_do_well_get_more() -> None:
    table = running(3)
    drafter = drafter_for(table, {3: 1.0, 48: 8.0})
    for _ in range(5):
        drafter.note(np.array([0, 1]), num_drafted=np.array([5, 5]), num_accepted=np.array([0, 5]))
    bad, good, unknown = propose(drafter, table)
    assert bad == 0 and good > unknown


def test_a_row_that_failed_is_tried_again_after_a_while() -> None:
    table = running(1)
    drafter = drafter_for(table, {1: 1.0, 16: 9.0})
    assert propose(drafter, table) != [0]
    for _ in range(5):
        drafter.note(np.array([0]), num_drafted=np.array([5]), num_accepted=np.array([0]))
    assert [propose(drafter, table) for _ in range(5)] == [[0]] * 5
    # Other rows show that such matches are good.
    drafter._length_hits[:] = drafter._length_tries * 0.9
    assert any(propose(drafter, table) != [0] for _ in range(300))


@pytest.mark.parametrize("always", [None, 7])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 9])
def test_drafts_keep_to_the_rows_that_the_step_has_left(always: int | None, num_rows: int) -> None:
    table = running(3)
    drafter = drafter_for(table, {3: 1.0, 48: 1.0}) if always is None else Drafter(table, always=always)
    for slot in range(3):
        drafter.add(slot, can_draft=True)
    assert sum(propose(drafter, table, num_rows=num_rows)) == num_rows
