"""How many sequences run at once where lengths are certain."""

from __future__ import annotations

import numpy as np
import pytest

from batchllm.engine.pacing import Pacing
from batchllm.engine.sequences import SequenceTable

FEWEST, MOST = 2, 30


def started(lengths: list[int], *, running: int, most: int = MOST) -> tuple[Pacing, SequenceTable]:
    """The first `running` rows of a plan of such lengths, longest first, begun in step 1 with prompts of 10 tokens."""
    table = SequenceTable(max_sequences=most, max_blocks=4, max_tokens=2000)
    pacing = Pacing(table=table, decode_tokens=np.array(lengths), fewest=FEWEST)
    for position, length in enumerate(lengths[:running]):
        tokens = np.arange(10, dtype=np.int32)
        slot = table.add(
            position=position, rank=position, tokens=tokens, prompt_length=10, max_tokens=tokens.size + length
        )
        pacing.begin(slot, step=1)
    return pacing, table


def test_before_anything_runs_all_may() -> None:
    pacing, table = started([100] * 20, running=0)
    assert pacing.most_running(next_position=0, tokens_put_back=0, step=1) == table.max_sequences


def test_as_many_run_as_end_with_the_longest() -> None:
    """Beside a row of 1,000 tokens, 1,000 running ones and 2,000 waiting ones of 40 each are done by four and a bit."""
    pacing, _ = started([1000, *[40] * 75], running=26)
    assert pacing.most_running(next_position=26, tokens_put_back=0, step=1) == 5
    assert pacing.most_running(next_position=26, tokens_put_back=2000, step=1) == 7
    assert pacing.most_running(next_position=76, tokens_put_back=0, step=1) == 3


def test_no_fewer_run_than_keep_the_machine_busy_and_no_more_than_there_is_room_for() -> None:
    pacing, table = started([1000, 8, 8], running=1)
    assert pacing.most_running(next_position=1, tokens_put_back=0, step=1) == FEWEST
    pacing, table = started([100] * 200, running=MOST)
    assert pacing.most_running(next_position=MOST, tokens_put_back=0, step=1) == MOST


def test_rows_that_take_several_tokens_a_step_leave_room_for_fewer_beside_the_one_that_does_not() -> None:
    pacing, table = started([600, *[500] * 5, *[40] * 20], running=6)
    before = pacing.most_running(next_position=6, tokens_put_back=0, step=1)
    # After 100 steps the first one has 100 tokens, the others 300 each.
    slots = table.running
    table.num_tokens[slots] += np.where(table.position[slots] == 0, 100, 300)
    assert pacing.most_running(next_position=6, tokens_put_back=0, step=101) == 4 < before == 8


def test_what_finished_rows_took_tells_what_waiting_ones_will() -> None:
    pacing, table = started([1000, *[40] * 75], running=6)
    assert pacing.most_running(next_position=6, tokens_put_back=0, step=1) == 5
    done = table.running[1:]
    table.num_tokens[done] = 50
    pacing.finish(done, step=20)
    table.remove(done)
    # 40 tokens in 20 steps: half of the 2,800 waiting tokens take a step.
    assert pacing.most_running(next_position=6, tokens_put_back=0, step=1) == 3


@pytest.mark.parametrize("pace", [1, 3])
def test_a_batch_that_is_paced_ends_with_its_longest_row(pace: int) -> None:
    """Rows but the first take `pace` tokens a step; whoever is let in begins at once."""
    lengths = [300, *sorted(np.random.default_rng(1).integers(8, 90, size=60).tolist(), reverse=True)]
    pacing, table = started(lengths, running=0, most=12)
    next_position, step = 0, 0
    widths = []
    while next_position < len(lengths) or table.num_running:
        step += 1
        most = pacing.most_running(next_position=next_position, tokens_put_back=0, step=step)
        while next_position < len(lengths) and table.num_running < most:
            tokens = np.arange(10, dtype=np.int32)
            slot = table.add(
                position=next_position,
                rank=next_position,
                tokens=tokens,
                prompt_length=10,
                max_tokens=10 + lengths[next_position],
            )
            pacing.begin(slot, step=step)
            next_position += 1
        running = table.running
        widths.append(running.size)
        table.num_tokens[running] += np.where(table.position[running] == 0, 1, pace)
        table.num_tokens[running] = np.minimum(table.num_tokens[running], table.max_tokens[running])
        done = running[table.num_tokens[running] == table.max_tokens[running]]
        pacing.finish(done, step=step)
        table.remove(done)
    assert step <= 303
    assert widths.count(1) < 30, "the longest is alone for less than a tenth of the steps"
    assert (widths[0] > widths[150]) == (pace > 1)
