"""What a step's attention reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchllm import ops
from batchllm.engine.holdings import SchedulerConfig, WaitingSequence
from batchllm.engine.scheduler import Scheduler
from batchllm.engine.step import KvReads, PlanArrays, StepBatch, build_step
from batchllm.kernels.attention import CHUNK, AttentionPlan
from batchllm.planner.plan import make_plan
from batchllm.planner.store import PromptStore
from batchllm.prompt import SamplingParams

NOTHING = np.zeros(0, dtype=np.int32)
BLOCK_SIZE = 16


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


def run_steps(
    folder: Path, prompts: list[list[int]], *, new_tokens: int, forced: int = 0, max_step_tokens: int = 4096
) -> Iterator[StepBatch]:
    """All steps; each sequence takes `new_tokens`, the first of them with `forced` more in one step."""
    store = PromptStore(folder)
    store.append_batch(
        row_index=np.arange(len(prompts)),
        lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        tokens=np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
        sampling_ids=np.full(
            len(prompts), store.intern_sampling(SamplingParams(max_tokens=new_tokens)), dtype=np.int32
        ),
    )
    store.finish()
    plan = make_plan(store, prefix_sharing=True)
    store.close()

    def load(position: int) -> WaitingSequence:
        tokens = np.array(prompts[int(plan.order[position])], dtype=np.int32)
        return WaitingSequence(
            position=position, tokens=tokens, prompt_length=tokens.size, max_tokens=tokens.size + new_tokens
        )

    longest = max(map(len, prompts)) + new_tokens
    scheduler = Scheduler(
        config=SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_step_tokens=max_step_tokens,
            max_sequences=len(prompts),
            max_context=longest,
        ),
        plan=plan,
        num_blocks=len(prompts) * (longest // BLOCK_SIZE + 2),
        load=load,
    )
    table = scheduler.table
    while not scheduler.done:
        batch = build_step(scheduler.schedule(), scheduler, chunk=CHUNK)
        yield batch
        slots = np.unique(batch.sample_slots)
        scheduler.append(slots, np.ones(slots.size, dtype=np.int32))
        for _ in range(forced):
            first = slots[:1][table.num_tokens[slots[:1]] < table.max_tokens[slots[:1]]]
            scheduler.append_forced(first, np.ones(first.size, dtype=np.int32))
        scheduler.finish(slots[table.num_tokens[slots] == table.max_tokens[slots]])


def decoding_plan(folder: Path, prompts: list[list[int]]) -> PlanArrays:
    """Of the last step in which every prompt has one row."""
    plans = (batch.plan for batch in run_steps(folder, prompts, new_tokens=6))
    return [plan for plan in plans if plan.tables.tolist() == list(range(len(prompts)))][-1]


def test_rows_below_a_node_that_ends_in_a_chunk_have_one_item_that_forks_there(tmp_path: Path) -> None:
    # A document of 300 tokens, examples of 140 behind it, and a question of ten.
    prompts = [[1] * 300 + [2 + group] * 140 + [9 + question] * 10 for group in range(2) for question in range(3)]
    plan = decoding_plan(tmp_path, prompts)
    stops = plan.positions + 1
    # The blocks of 416 to 432 are shared as well, but the step of 32 positions in which they lie is not.
    assert plan.items.tolist() == [
        [0, 6, 0, 256, 256, 0],
        [0, 3, 256, stops[:3].max(), 416, 6],
        [3, 3, 256, stops[3:].max(), 416, 9],
    ]
    alone = int(stops.sum()) - 6 * 416
    assert plan.reads_of(6) == KvReads(num_read=256 + 2 * 160 + alone, num_spared=5 * 256 + 4 * 160)


def test_rows_that_share_their_first_tokens_alone_write_their_outputs_from_one_item(tmp_path: Path) -> None:
    plan = decoding_plan(tmp_path, [[1] * 70 + [2 + row] * (10 + row) for row in range(5)])
    assert plan.items.tolist() == [[0, 5, 0, plan.positions.max() + 1, 64, -1]]
    assert plan.num_partials == plan.merge_rows.size == 0


def test_a_few_shared_tokens_before_many_chunks_that_are_not_are_read_by_each(tmp_path: Path) -> None:
    prompts = [[1] * 70 + [2 + row] * 400 for row in range(3)]
    plan = decoding_plan(tmp_path, prompts)
    assert plan.items[:, [1, 2, 5]].tolist() == [[1, 0, -1]] * 3


@st.composite
def prefix_trees(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that share prefixes of many lengths, around those at which chunks, blocks and steps end."""
    stems: list[list[int]] = [[]]
    for node in range(1, draw(st.integers(2, 14))):
        stem = stems[draw(st.integers(0, len(stems) - 1))]
        stems.append(stem + [node] * draw(st.sampled_from([1, 15, 16, 31, 32, 33, 60, 100, 129, 200, 256])))
    return stems[1:]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=prefix_trees(),
    forced=st.sampled_from([0, 1, 5]),
    max_step_tokens=st.sampled_from([90, 4096]),
    seed=st.integers(0, 1000),
)
def test_what_neighbours_read_together_and_what_the_last_layer_leaves_out_change_no_bit_of_any_row(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]], forced: int, max_step_tokens: int, seed: int
) -> None:
    kernels = ops.native_kernels()
    if isinstance(kernels, str):
        pytest.skip(f"needs the native kernels: {kernels}")
    generator = torch.Generator().manual_seed(seed)
    shape = (len(prompts) * (max(map(len, prompts)) // BLOCK_SIZE + 3), 1, 2, 2, BLOCK_SIZE, 64)
    pool = torch.randn(shape, generator=generator).bfloat16()
    folder = tmp_path_factory.mktemp("prompts")
    for batch in run_steps(folder, prompts, new_tokens=7, forced=forced, max_step_tokens=max_step_tokens):
        arrays = batch.plan
        num_rows = arrays.positions.size
        query = torch.randn(num_rows, 6, 64, generator=generator).bfloat16()
        first = np.flatnonzero(np.append(True, np.diff(arrays.tables) > 0))
        stops = arrays.positions[np.append(first[1:], num_rows) - 1] + 1
        zeros = np.zeros_like(first)
        apart = np.stack([first, np.diff(np.append(first, num_rows)), zeros, stops, stops, zeros - 1], axis=1)
        nothing = {"merge_rows": NOTHING, "merge_start": np.zeros(1, dtype=np.int32), "merge_partials": NOTHING}
        results = []
        for changed in (
            {"items": apart.astype(np.int32), "num_partials": 0, **nothing},
            {},
            {"items": arrays.items if arrays.last_items is None else arrays.last_items},
        ):
            values = {field.name: getattr(arrays, field.name) for field in fields(PlanArrays)}
            tensors = {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in (values | changed).items()
            }
            results.append(kernels.attention(query, pool, layer=0, plan=AttentionPlan(**tensors), scale=0.125))
        assert results[0].isfinite().all()
        assert torch.equal(results[1], results[0])
        assert torch.equal(results[2][batch.sample_rows], results[0][batch.sample_rows])


def test_the_last_layer_attends_the_last_row_of_a_whole_prompt_and_nothing_of_one_that_goes_on(tmp_path: Path) -> None:
    prompts = [[1 + row] * length for row, length in enumerate((40, 70, 50))]
    first, second, third = itertools.islice(run_steps(tmp_path, prompts, new_tokens=2, max_step_tokens=60), 3)
    assert first.plan.items.tolist() == [[0, 40, 0, 40, 40, -1], [40, 20, 0, 20, 20, -1]]
    assert first.plan.last_items is not None and first.plan.last_items.tolist() == [[39, 1, 0, 40, 40, -1]]
    # The first one decodes, the second comes to its end, the third begins.
    assert second.plan.last_items is not None
    assert second.plan.last_items.tolist() == [[0, 1, 0, 41, 41, -1], [50, 1, 0, 70, 70, -1]]
    assert third.plan.last_items is not None and third.plan.last_items[-1].tolist() == [41, 1, 0, 50, 50, -1]


def test_the_last_layer_attends_nothing_where_no_prompt_ends_and_all_where_each_row_is_sampled(tmp_path: Path) -> None:
    steps = list(run_steps(tmp_path, [[1] * 50], new_tokens=2, max_step_tokens=40))
    assert [None if step.plan.last_items is None else len(step.plan.last_items) for step in steps] == [0, 1, None]
