"""Two engines, one after the other, over one store: the second goes on with the sequences that the first finished."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from batchllm.engine.decoder import kv_shape
from batchllm.engine.engine import Engine, EngineConfig
from batchllm.engine.offload import StageReuse
from batchllm.engine.transfer import TierSetup
from batchllm.planner.plan import make_plan
from batchllm.prompt import Completion, SamplingParams

BLOCK = 4
NUM_ROWS = 10
Answers = dict[int, Completion]


@pytest.fixture(scope="module")
def tier_job() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tier_job", Path(__file__).resolve().parent / "tier_job.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tier_job"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run_stage(tier_job: ModuleType, list_prompts: Callable[..., Any]) -> Callable[..., tuple[Answers, Engine]]:
    """A function (prompts, tiers, reuse) -> the answers by row, and the engine, closed; its tiers stay open."""
    decoder = tier_job.make_decoder()

    def run(
        prompts: list[list[int]], tiers: TierSetup | None, reuse: StageReuse, *, num_blocks: int = 2000
    ) -> tuple[Answers, Engine]:
        params = [SamplingParams(max_tokens=9 + row % 5, ignore_eos=True) for row in range(len(prompts))]
        store = list_prompts(prompts, params)
        engine = Engine(
            decoder=decoder,
            vocabulary=tier_job.Letters(),
            store=store,
            plan=make_plan(store, prefix_sharing=True),
            config=EngineConfig(block_size=BLOCK, num_blocks=num_blocks, max_step_tokens=48, max_sequences=3),
            seed=3,
            started_at=time.monotonic(),
            tiers=None if tiers is None else replace(tiers, reuse=reuse),
        )
        answers: list[Completion] = []
        engine.run(deliver=answers.extend)
        engine.close(keep_tiers=True)
        return {answer.row_index: answer for answer in answers}, engine

    run.block_bytes = kv_shape(decoder).block_bytes(BLOCK)  # type: ignore[attr-defined]
    return run


def first_prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    head = random.integers(0, 60, 13).tolist()
    return [head + random.integers(0, 60, 5 + row).tolist() for row in range(NUM_ROWS)]


def next_prompts(prompts: list[list[int]], answers: Answers) -> list[list[int]]:
    """Each conversation so far, and a turn of three tokens."""
    return [prompt + answers[row].token_ids + [1, 2, 3] for row, prompt in enumerate(prompts)]


def says(answers: Answers) -> dict[int, tuple[list[int], str | None]]:
    return {row: (answer.token_ids, answer.error) for row, answer in answers.items()}


FIRST = StageReuse(is_continued=True)
SECOND = StageReuse(continues=True, is_continued=True, number=1)
THIRD = StageReuse(continues=True, number=2)

SIZES = {"host": (1000, 0), "disk": (0, 1000), "host over disk": (6, 1000)}


@pytest.mark.parametrize("num_blocks", [2000, 30], ids=["wide pool", "small pool"])
@pytest.mark.parametrize(("host", "disk"), SIZES.values(), ids=SIZES.keys())
def test_each_stage_computes_only_what_is_new_of_its_conversation(
    tier_job: ModuleType, run_stage: Any, tmp_path: Path, host: int, disk: int, num_blocks: int
) -> None:
    wanted = tier_job.Tiers(host=host, disk=disk, folder=tmp_path if disk else None)
    setup = tier_job.open_setup(wanted, block_bytes=run_stage.block_bytes)
    prompts = first_prompts()
    for reuse in (FIRST, SECOND, THIRD):
        plain, _engine = run_stage(prompts, None, StageReuse())
        answers, engine = run_stage(prompts, setup, reuse, num_blocks=num_blocks)
        assert says(answers) == says(plain)
        if reuse.continues:
            # The last token that was generated is not among what was computed of it.
            covered = [(len(prompt) - 4) // BLOCK * BLOCK for prompt in prompts]
            assert all(answers[row].cached_tokens >= covered[row] for row in range(NUM_ROWS))
            assert engine.metrics.restored_tokens > sum(covered) / 2
        setup.store.check_integrity()
        prompts = next_prompts(prompts, answers)
    setup.store.close()


def test_what_a_stage_did_not_fetch_makes_room_when_it_ends(tier_job: ModuleType, run_stage: Any) -> None:
    setup = tier_job.open_setup(tier_job.Tiers(host=1000), block_bytes=run_stage.block_bytes)
    prompts = first_prompts()
    answers, _engine = run_stage(prompts, setup, FIRST)
    kept = setup.store.host.num_blocks
    assert kept >= sum((len(prompt) + 9 - 13) // BLOCK for prompt in prompts)
    # The rows failed in between: other prompts come, and nothing of the first stage is asked for.
    random = np.random.default_rng(8)
    others = [random.integers(0, 60, 20).tolist() for _ in range(3)]
    run_stage(others, setup, SECOND)
    own = sum((20 + 9 + row - 1) // BLOCK for row in range(3))
    assert setup.store.host.num_blocks == own
    setup.store.close()


def test_a_stage_that_is_not_continued_keeps_no_finished_sequence(tier_job: ModuleType, run_stage: Any) -> None:
    setup = tier_job.open_setup(tier_job.Tiers(host=1000), block_bytes=run_stage.block_bytes)
    run_stage(first_prompts(), setup, StageReuse())
    assert setup.store.host.num_blocks == 0
    setup.store.close()
