from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchllm.errors import InputError
from batchllm.planner.plan import make_plan
from batchllm.planner.requests import Request, following_uses, read_trace, requests_of_plan
from batchllm.planner.store import PromptStore


def test_a_plans_requests_share_exactly_the_whole_blocks_of_common_prefixes(
    stage_prompts: Callable[..., PromptStore],
) -> None:
    common = list(range(10))
    store = stage_prompts([[*common, 50, 51, 52], [*common, 60], [70, 71, 72, 73, 74]], [3, 9, 1])
    plan = make_plan(store, prefix_sharing=True, keep_order=True)
    requests = requests_of_plan(plan, block_size=4)
    first, second, third = requests.requests
    assert first.blocks[:2].tolist() == second.blocks[:2].tolist()
    assert (len(first.blocks), len(second.blocks), len(third.blocks)) == (3, 2, 1)
    assert len({*first.blocks.tolist(), *second.blocks.tolist(), *third.blocks.tolist()}) == requests.working_set == 4
    # 13 + 3 - 1 = 15 tokens are 4 blocks, 11 + 9 - 1 = 19 are 5, 5 + 1 - 1 = 5 are 2.
    assert [request.num_private for request in requests.requests] == [1, 3, 1]


def test_a_trace_is_read_line_by_line_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1030, "output_length": 513, "hash_ids": [7, 900, 12]}\n'
        '{"timestamp": 5, "input_length": 600, "output_length": 0, "hash_ids": [7, 13]}\n'
    )
    requests = read_trace(path)
    assert [request.blocks.tolist() for request in requests.requests] == [[0, 1, 2], [0, 3]]
    assert [request.num_private for request in requests.requests] == [2, 0]
    assert (requests.block_tokens, requests.num_blocks) == (512, 4)
    assert len(read_trace(path, limit=1).requests) == 1


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "nonsense",
        '{"input_length": 1, "output_length": 1}',
        '{"input_length": 1, "output_length": 1, "hash_ids": ["x"]}',
        '{"input_length": 1, "output_length": 1, "hash_ids": [3, 3]}',
        '{"input_length": -1, "output_length": 1, "hash_ids": [3]}',
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 1, "output_length": 1, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        read_trace(path)


def test_a_trace_that_is_not_there_or_empty_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name in ("missing.jsonl", "empty.jsonl"):
        with pytest.raises(InputError, match=name):
            read_trace(tmp_path / name)


def test_the_following_use_is_the_next_request_that_reads_a_block_the_deeper_the_later() -> None:
    requests = [Request(np.array(blocks), 0, 0, 0) for blocks in ([0, 1], [2], [0, 1, 2])]
    first, second, third = following_uses(requests, 3)
    assert 2 <= first[0] < first[1] < second[0] < 3
    assert np.isinf(third).all()
