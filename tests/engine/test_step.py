"""What a step's attention reads."""

from __future__ import annotations

import numpy as np

from batchllm.engine.step import KvReads, PlanArrays

NOTHING = np.zeros(0, dtype=np.int32)


def test_a_shared_item_is_read_once_and_spares_the_other_rows_and_prompt_rows_do_not_count() -> None:
    items = np.array(
        [
            [0, 3, 0, 512, 512, 0],  # three sequences read 512 tokens together,
            [0, 1, 512, 520, 520, 3],
            [1, 1, 512, 530, 530, 4],
            [2, 1, 512, 513, 513, 5],
            [3, 1, 0, 7, 7, -1],  # one reads seven alone,
            [4, 100, 0, 100, 100, -1],  # and a prompt of a hundred is computed.
        ],
        dtype=np.int32,
    )
    plan = PlanArrays(
        positions=NOTHING,
        tables=NOTHING,
        block_table=NOTHING,
        items=items,
        merge_rows=NOTHING,
        merge_start=NOTHING,
        merge_partials=NOTHING,
        num_partials=6,
    )
    assert plan.reads_of(4) == KvReads(num_read=512 + 8 + 18 + 1 + 7, num_spared=2 * 512)
    assert plan.reads_of(0) == KvReads(num_read=0, num_spared=0)


def test_the_front_of_an_item_that_forks_is_read_once_and_the_rest_by_each_row() -> None:
    plan = PlanArrays(
        positions=np.array([330, 290, 511, 9], dtype=np.int32),
        tables=np.arange(4, dtype=np.int32),
        block_table=NOTHING,
        items=np.array([[0, 3, 256, 512, 288, -1], [3, 1, 0, 10, 10, -1]], dtype=np.int32),
        merge_rows=NOTHING,
        merge_start=NOTHING,
        merge_partials=NOTHING,
        num_partials=0,
    )
    assert plan.reads_of(3) == KvReads(num_read=32 + (331 - 288) + (291 - 288) + (512 - 288), num_spared=2 * 32)
