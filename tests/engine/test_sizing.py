"""What a device decides of an engine beside its sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from batchllm.engine.engine import EngineConfig
from batchllm.engine.pool import KvShape
from batchllm.engine.scheduler import Speculation
from batchllm.engine.sizing import least_tokens, size_engine
from batchllm.errors import JobError
from batchllm.planner.plan import make_plan
from batchllm.prompt import SamplingParams

Size = Callable[[str, Speculation], EngineConfig]


@pytest.fixture
def size(list_prompts: Any) -> Size:
    plan = make_plan(list_prompts([[1, 2, 3], [4, 5]], [SamplingParams(max_tokens=4)] * 2), prefix_sharing=True)

    def engine(device: str, speculation: Speculation) -> EngineConfig:
        return size_engine(
            plan=plan,
            shape=KvShape(2, 1, 8, torch.float32),
            device=torch.device(device),
            max_context=64,
            block_size=4,
            max_step_tokens="auto",
            max_sequences="auto",
            kv_bytes=1 << 20,
            speculation=speculation,
        )

    return engine


def test_an_engine_runs_ahead_on_a_gpu_and_drafts_on_a_cpu(size: Size) -> None:
    on_gpu, on_cpu = size("cuda", "auto"), size("cpu", "auto")
    assert (on_gpu.runs_ahead, on_gpu.speculation) == (True, "off")
    assert (on_cpu.runs_ahead, on_cpu.speculation) == (False, "auto")


def test_a_number_of_drafts_is_refused_on_a_gpu_by_name(size: Size) -> None:
    assert size("cpu", 4).speculation == 4
    with pytest.raises(JobError, match=r"engine\.speculation: 4 drafted tokens are not supported on cuda"):
        size("cuda", 4)


@pytest.mark.parametrize(
    ("max_tokens", "step_tokens", "sequences", "is_certain", "tokens"),
    [
        ([4, 4], 16, 2, True, 5 + 2 * 2),
        ([4, 9], 16, 2, True, 5 + 2 * 2),
        ([4, 4], 16, 2, False, 5),
        ([4, 4], 16, 1, True, 5),
        ([2, 9], 2, 2, True, 5),
    ],
    ids=["certain", "as the shortest", "may end early", "one after the other", "ended before the last begins"],
)
def test_memory_is_found_for_what_all_rows_hold_at_once(
    list_prompts, max_tokens, step_tokens, sequences, is_certain, tokens
):
    sampling = [SamplingParams(max_tokens=number) for number in max_tokens]
    plan = make_plan(list_prompts([[1, 2, 3], [4, 5]], sampling), prefix_sharing=True)
    config = EngineConfig(block_size=4, num_blocks=8, max_step_tokens=step_tokens, max_sequences=sequences)
    assert least_tokens(plan, config, lengths_are_certain=is_certain) == tokens


def test_a_pool_for_rows_in_their_own_order_has_room_for_documents_that_lie_apart(list_prompts: Any) -> None:
    documents = [[100 + number] * 100 for number in range(10)]
    prompts = [documents[row % 10] + [row] for row in range(40)]
    plan = make_plan(list_prompts(prompts, [SamplingParams(max_tokens=4)] * 40), prefix_sharing=True, keep_order=True)
    config = size_engine(
        plan=plan,
        shape=KvShape(1, 1, 8, torch.float32),
        device=torch.device("cpu"),
        max_context=200,
        block_size=4,
        max_step_tokens="auto",
        max_sequences=10,
        kv_bytes="auto",
    )
    # Ten neighbours are of ten documents: each holds its own 101 tokens and up to 4 more.
    assert config.num_blocks * 4 >= 10 * (101 + 4)
