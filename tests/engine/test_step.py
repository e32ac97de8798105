"""What a step's attention reads."""

from __future__ import annotations

import numpy as np

from batchllm.engine.step import KvReads, PlanArrays

NOTHING = np.zeros(0, dtype=np.int32)


def test_a_shared_item_is_read_once_and_spares_the_other_rows_and_prompt_rows_do_not_count() -> None:
    items = np.array(
        [
            [0, 3, 0, 512, 0, 0],  # three sequences read 512 tokens together,
            [0, 1, 512, 520, 0, 3],
            [1, 1, 512, 530, 1, 4],
            [2, 1, 512, 513, 2, 5],
            [3, 1, 0, 7, 3, -1],  # one reads seven alone,
            [4, 100, 0, 100, 4, -1],  # and a prompt of a hundred is computed.
        ],
        dtype=np.int32,
    )
    plan = PlanArrays(
        positions=NOTHING,
        block_table=NOTHING,
        items=items,
        merge_rows=NOTHING,
        merge_start=NOTHING,
        merge_partials=NOTHING,
        num_partials=6,
    )
    assert plan.reads_of(4) == KvReads(num_read=512 + 8 + 18 + 1 + 7, num_spared=2 * 512)
    assert plan.reads_of(0) == KvReads(num_read=0, num_spared=0)
