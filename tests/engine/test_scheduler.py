"""The scheduler and its step batches against a symbolic machine, in which a block holds names of tokens instead of numbers.

A slot of the symbolic pool holds the whole token prefix that was there when it was written; so a row that reads a wrong, stale, unwritten
or missing slot is found, whatever the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchllm.engine.blocks import num_blocks_for
from batchllm.engine.drafts import Drafter, Drafts
from batchllm.engine.holdings import KvTiers, SchedulerConfig, WaitingSequence
from batchllm.engine.scheduler import Scheduler
from batchllm.engine.sequences import SequenceTable
from batchllm.engine.step import StepBatch, build_step
from batchllm.planner.drain import Width
from batchllm.planner.plan import Plan, make_plan
from batchllm.prompt import SamplingParams


class StagedPrompts:
    """Prompts staged as the planner reads them."""

    def __init__(self, folder: Path, prompts: list[list[int]], max_tokens: int) -> None:
        self.folder = folder
        self.prompts = [np.array(prompt, dtype=np.int32) for prompt in prompts]
        self.length = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        self.offset = (np.cumsum(self.length) - self.length).astype(np.int64)
        self.sampling = [SamplingParams(max_tokens=max_tokens)]
        self.sampling_id = np.zeros(len(prompts), dtype=np.int32)
        np.concatenate(self.prompts).astype("<i4").tofile(folder / "tokens.bin")


class SymbolicMover:
    """Tiers of a symbolic machine: saves pin their blocks and loads are late for a while, blocks get lost, all by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.slots: dict[int, tuple[int, ...]] = {}
        self.block_size = 1
        self.kept: dict[bytes, list[tuple[int, ...] | None]] = {}
        self.loads: list[tuple[int, bytes, int]] = []
        self.pinned: list[tuple[int, list[tuple[int, ...] | None]]] = []
        self.num_tickets = 0
        self.num_loaded = 0

    def contents(self, block: int) -> list[tuple[int, ...] | None]:
        return [self.slots.get(block * self.block_size + offset) for offset in range(self.block_size)]

    @property
    def is_empty(self) -> bool:
        return not self.kept

    @property
    def is_quiet(self) -> bool:
        return not self.loads and not self.pinned

    def contains(self, key: bytes) -> bool:
        return key in self.kept

    def pays(self, num_blocks: int, *, recompute_tokens: int) -> bool:
        return bool(self.random.random() > 0.1)

    def save(self, key: bytes, block: int, *, next_use: float, recompute_tokens: int, keep: bool) -> bool:
        if self.random.random() < 0.1:
            return True
        self.kept[key] = self.contents(block)
        if self.random.random() < 0.7:
            return True
        self.pinned.append((block, self.contents(block)))
        return False

    def load(self, key: bytes, block: int) -> int:
        self.num_tickets += 1
        self.loads.append((self.num_tickets, key, block))
        return self.num_tickets

    def prefetch(self, key: bytes, next_use: float) -> None:
        pass

    def drop(self, key: bytes) -> None:
        self.kept.pop(key, None)

    def poll(self, timeout_s: float) -> tuple[list[tuple[int, bool]], list[int]]:
        ended, later = [], []
        for ticket, key, block in self.loads:
            if timeout_s == 0 and self.random.random() < 0.5:
                later.append((ticket, key, block))
                continue
            found = key in self.kept and self.random.random() > 0.1
            if found:
                self.num_loaded += 1
                for offset, content in enumerate(self.kept[key]):
                    if content is not None:
                        self.slots[block * self.block_size + offset] = content
            ended.append((ticket, found))
        self.loads = later
        released = []
        for block, contents in [*self.pinned]:
            # Behind the tokens that were saved, a sequence that shares the block may go on.
            stop = 1
            while stop < len(contents) and contents[stop] and contents[stop][:-1] == contents[stop - 1]:
                stop += 1
            assert self.contents(block)[:stop] == contents[:stop], "a pinned block was written"
            if self.random.random() < 0.5:
                self.pinned.remove((block, contents))
                released.append(block)
        return ended, released


class SymbolicDrafter(Drafter):
    """Drafts what the 'model' will say, up to a mistake, by a seed."""

    def __init__(self, table: SequenceTable, seed: int) -> None:
        super().__init__(table, always=None)
        self.random = np.random.default_rng(seed)

    def propose(self, slots: np.ndarray, *, limits: np.ndarray, num_rows: int, num_prefill: int) -> Drafts | None:
        found: list[list[int]] = []
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            assert limit >= 0
            tokens = self._table.tokens[slot, : self._table.num_tokens[slot]].tolist()
            draft: list[int] = []
            for _ in range(min(limit, num_rows, int(self.random.integers(0, 5)))):
                right = SymbolicMachine.next_token((*tokens, *draft))
                draft.append(right if self.random.random() < 0.7 else (right + 1) % 7)
            num_rows -= len(draft)
            found.append(draft)
        counts = np.array([len(draft) for draft in found], dtype=np.int64)
        return Drafts(counts, np.array([token for draft in found for token in draft], dtype=np.int32))


class SymbolicMachine:
    """Runs scheduled steps; the 'model' continues a prefix with a number that depends on all of it."""

    def __init__(
        self,
        *,
        plan: Plan,
        store: StagedPrompts,
        config: SchedulerConfig,
        num_blocks: int,
        max_new: int,
        chunk: int,
        mover: SymbolicMover | None = None,
        persist: bool = False,
        draft_seed: int | None = None,
        force_seed: int | None = None,
    ) -> None:
        self.forcing = None if force_seed is None else np.random.default_rng(force_seed)
        self.store, self.plan, self.max_new, self.chunk = store, plan, max_new, chunk
        self.scheduler = Scheduler(
            config=config,
            plan=plan,
            num_blocks=num_blocks,
            load=self.load,
            tiers=None if mover is None else KvTiers(mover=mover, root=bytes(32), persist=persist),
        )
        self.mover = mover
        self.slots: dict[int, tuple[int, ...]] = {}
        if mover is not None:
            mover.slots, mover.block_size = self.slots, config.block_size
        self.computed_rows = 0
        self.num_drafted = self.num_forks = 0
        if draft_seed is not None:
            self.scheduler.drafter = SymbolicDrafter(self.scheduler.table, draft_seed)
        self.outputs: dict[int, list[int]] = {}

    def load(self, position: int) -> WaitingSequence:
        tokens = self.store.prompts[int(self.plan.order[position])]
        return WaitingSequence(
            position=position, tokens=tokens, prompt_length=tokens.size, max_tokens=tokens.size + self.max_new
        )

    @staticmethod
    def next_token(prefix: tuple[int, ...]) -> int:
        return sum((index + 1) * token for index, token in enumerate(prefix)) % 7

    def step(self) -> None:
        scheduler, table = self.scheduler, self.scheduler.table
        step = scheduler.schedule()
        if step.slots.size == 0:
            assert scheduler.num_in_flight or step.preempted or (self.mover and self.mover.pinned)
            scheduler.wait(1.0)
            return
        size = scheduler.config.block_size
        copied = {target: [self.slots.get(source * size + i) for i in range(size)] for source, target in step.copies}
        for target, contents in copied.items():
            for offset, content in enumerate(contents):
                self.slots.pop(target * size + offset, None)
                if content is not None:
                    self.slots[target * size + offset] = content
        batch = build_step(step, scheduler, chunk=self.chunk)
        rows = batch.token_ids.size
        assert rows <= scheduler.config.max_step_tokens
        row_slots = np.repeat(step.slots, step.num_rows)
        self.computed_rows += rows
        written = batch.kv_slots[batch.kv_slots >= 0]
        assert np.unique(written).size == written.size, "two rows write one slot"
        for row in range(rows):
            prefix = tuple(table.tokens[row_slots[row], : batch.plan.positions[row] + 1].tolist())
            if batch.kv_slots[row] >= 0:
                self.slots[int(batch.kv_slots[row])] = prefix
        self.check_attention(batch, row_slots)
        slots = np.unique(batch.sample_slots)
        ended: set[int] = set()
        for row, slot in zip(batch.sample_rows.tolist(), batch.sample_slots.tolist(), strict=True):
            prefix = table.tokens[slot, : int(batch.plan.positions[row]) + 1].tolist()
            # A row whose token is not the one before it gave computed nothing that counts.
            if slot in ended or len(prefix) != table.num_tokens[slot] or prefix[-1] != batch.token_ids[row]:
                ended.add(slot)
                continue
            scheduler.append(np.array([slot]), np.array([self.next_token(tuple(prefix))]))
        self.num_drafted += step.num_drafted
        scheduler.drop_drafts(slots)
        self.force(slots)
        size = scheduler.config.block_size
        running = table.running[~table.is_restoring[table.running]]
        assert (table.num_blocks[running] * size >= table.num_computed[running]).all()
        done = slots[table.num_tokens[slots] == table.max_tokens[slots]]
        for slot in done:
            row = int(self.plan.order[table.position[slot]])
            assert row not in self.outputs
            self.outputs[row] = table.tokens[slot, table.prompt_length[slot] : table.num_tokens[slot]].tolist()
        scheduler.finish(done)

    def force(self, slots: np.ndarray) -> None:
        """Some sequences get tokens behind the sampled one that need no sampling, as many as may be, by the seed."""
        table = self.scheduler.table
        for slot in slots if self.forcing is not None else ():
            for _ in range(int(self.forcing.integers(0, self.scheduler.config.max_step_tokens))):
                if table.num_tokens[slot] < table.max_tokens[slot]:
                    prefix = tuple(table.tokens[slot, : table.num_tokens[slot]].tolist())
                    self.scheduler.append_forced(np.array([slot]), np.array([self.next_token(prefix)]))

    def check_attention(self, batch: StepBatch, row_slots: np.ndarray) -> None:
        """Each row reads each position up to its own once, from a slot that holds just that prefix."""
        plan, size, chunk = batch.plan, self.scheduler.config.block_size, self.chunk
        spans: dict[int, list[tuple[int, int]]] = {row: [] for row in range(batch.token_ids.size)}
        merged: dict[int, dict[int, tuple[int, int]]] = {row: {} for row in spans}
        for row_start, num_rows, kv_start, kv_stop, shared_stop, partial in plan.items.tolist():
            assert kv_start % chunk == 0 and kv_start < shared_stop <= kv_stop
            assert shared_stop == kv_stop or kv_stop <= kv_start + chunk
            self.num_forks += shared_stop < kv_stop
            for row in range(row_start, row_start + num_rows):
                stop = min(kv_stop, int(plan.positions[row]) + 1)
                tokens = self.scheduler.table.tokens[row_slots[row]]
                assert shared_stop == kv_stop or stop > shared_stop
                for position in range(kv_start, stop):
                    reader = row_start if position < shared_stop else row
                    slot = int(plan.block_table[plan.tables[reader], position // size]) * size + position % size
                    assert self.slots.get(slot) == tuple(tokens[: position + 1].tolist())
                if partial < 0:
                    spans[row].append((kv_start, stop))
                elif kv_start == 0:
                    merged[row][partial + row - row_start] = (0, stop)
                else:
                    # A chunk behind the row leaves it nothing.
                    for number, start in enumerate(range(kv_start, stop, chunk)):
                        index = partial + number * num_rows + row - row_start
                        merged[row][index] = (start, min(start + chunk, stop))
        for index, row in enumerate(plan.merge_rows.tolist()):
            numbers = plan.merge_partials[plan.merge_start[index] : plan.merge_start[index + 1]].tolist()
            assert len(numbers) == len(merged[row])
            spans[row].extend(merged[row][number] for number in numbers)
        for row, parts in spans.items():
            end = 0
            for start, stop in parts:
                assert start == end
                end = stop
            assert end == plan.positions[row] + 1

    def expected(self, row: int) -> list[int]:
        tokens = self.store.prompts[row].tolist()
        for _ in range(self.max_new):
            tokens.append(self.next_token(tuple(tokens)))
        return tokens[-self.max_new :]


def machine(
    folder: Path,
    prompts: list[list[int]],
    *,
    max_new: int,
    block_size: int,
    budget: int,
    sequences: int,
    blocks: int,
    sharing: bool,
    chunk: int,
    keep_order: bool = False,
    mover: SymbolicMover | None = None,
    persist: bool = False,
    least_recent: bool = False,
    draft_seed: int | None = None,
    force_seed: int | None = None,
    is_paced: bool = False,
) -> SymbolicMachine:
    store = StagedPrompts(folder, prompts, max_new)
    plan = make_plan(store, prefix_sharing=sharing, keep_order=keep_order)
    if is_paced:
        plan = dataclasses.replace(plan, width=Width(most=sequences, fewest=1))
    config = SchedulerConfig(
        block_size=block_size,
        max_step_tokens=budget,
        max_sequences=sequences,
        max_context=max(map(len, prompts)) + max_new,
        evict_least_recent=least_recent,
    )
    return SymbolicMachine(
        plan=plan,
        store=store,
        config=config,
        num_blocks=blocks,
        max_new=max_new,
        chunk=chunk,
        mover=mover,
        persist=persist,
        draft_seed=draft_seed,
        force_seed=force_seed,
    )


@st.composite
def prompt_trees(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that share prefixes of many depths, with duplicates and prefixes of each other."""
    stems: list[list[int]] = [[]]
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        stem = stems[draw(st.integers(0, len(stems) - 1))]
        prompt = stem + draw(st.lists(st.integers(0, 3), min_size=0 if stem else 1, max_size=9))
        prompts.append(prompt)
        stems.append(prompt)
    return prompts


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), prompts=prompt_trees())
def test_every_row_reads_its_own_prefix_and_finishes_whatever_the_limits(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, prompts: list[list[int]]
) -> None:
    max_new = data.draw(st.integers(1, 9))
    block_size = data.draw(st.sampled_from([1, 2, 3, 4]))
    largest = num_blocks_for(max(map(len, prompts)) + max_new, block_size)
    runner = machine(
        tmp_path_factory.mktemp("prompts"),
        prompts,
        max_new=max_new,
        block_size=block_size,
        budget=data.draw(st.integers(1, 12)),
        sequences=data.draw(st.integers(1, 5)),
        blocks=largest + data.draw(st.integers(0, 10)),
        sharing=data.draw(st.booleans()),
        chunk=data.draw(st.sampled_from([2, 4, 16])),
        keep_order=data.draw(st.booleans()),
        mover=SymbolicMover(data.draw(st.integers(0, 1000))) if data.draw(st.booleans()) else None,
        persist=data.draw(st.booleans()),
        least_recent=data.draw(st.booleans()),
        draft_seed=data.draw(st.integers(0, 1000)) if data.draw(st.booleans()) else None,
        force_seed=data.draw(st.integers(0, 1000)) if data.draw(st.booleans()) else None,
        is_paced=data.draw(st.booleans()),
    )
    preempt = data.draw(st.lists(st.integers(0, 4), max_size=6))
    for _ in range(3000):
        if runner.scheduler.done:
            break
        runner.step()
        runner.scheduler.check_integrity()
        running = runner.scheduler.table.running
        running = running[~runner.scheduler.table.is_restoring[running]]
        if preempt and running.size and (victim := preempt.pop()) < running.size:
            runner.scheduler.preempt(int(running[victim]))
            runner.scheduler.check_integrity()
    assert runner.scheduler.done
    for _ in range(100):
        runner.scheduler.wait(1.0)
    runner.scheduler.check_integrity()
    assert runner.outputs == {row: runner.expected(row) for row in range(len(prompts))}


def test_drafts_that_are_right_save_steps_and_leave_no_block_behind(tmp_path: Path) -> None:
    prompts = [[row, 1, 2, 3, 4] for row in range(6)]
    num_steps = {}
    for seed in (None, 5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        runner = machine(
            folder,
            prompts,
            max_new=40,
            block_size=4,
            budget=64,
            sequences=6,
            blocks=80,
            sharing=True,
            chunk=4,
            draft_seed=seed,
        )
        steps = 0
        while not runner.scheduler.done:
            runner.step()
            runner.scheduler.check_integrity()
            steps += 1
        assert runner.outputs == {row: runner.expected(row) for row in range(6)}
        assert runner.scheduler.holdings.num_unfilled_slots <= 6 * 4
        num_steps[seed] = steps
    assert runner.num_drafted > 0
    assert num_steps[5] < 0.75 * num_steps[None]


def test_each_shared_token_is_computed_once_when_there_is_room(tmp_path: Path) -> None:
    stem = [1, 2, 3, 4, 5, 6, 7]
    prompts = [[*stem, 8 + i, 9, 9, 9, 9 + i % 2] for i in range(6)] + [stem, [*stem, 8]]
    runner = machine(
        tmp_path, prompts, max_new=1, block_size=4, budget=1000, sequences=8, blocks=100, sharing=True, chunk=4
    )
    while not runner.scheduler.done:
        runner.step()
    # A prompt that lies wholly in another's computes its last token again, for its logits.
    assert runner.computed_rows - 2 <= runner.plan.unique_prompt_tokens + 2
    assert runner.computed_rows >= runner.plan.unique_prompt_tokens


def test_duplicates_compute_only_their_last_token_again(tmp_path: Path) -> None:
    runner = machine(
        tmp_path,
        [[1, 2, 3, 4, 5, 6, 7, 8]] * 5,
        max_new=1,
        block_size=4,
        budget=1000,
        sequences=8,
        blocks=100,
        sharing=True,
        chunk=4,
    )
    while not runner.scheduler.done:
        runner.step()
    assert runner.computed_rows == 8 + 4


def test_nested_nodes_that_keep_the_same_block_give_it_back_when_the_pool_is_one_block(tmp_path: Path) -> None:
    runner = machine(
        tmp_path, [[0], [0, 0], [0, 0]], max_new=1, block_size=3, budget=1, sequences=1, blocks=1, sharing=True, chunk=2
    )
    for _ in range(50):
        if not runner.scheduler.done:
            runner.step()
    assert sorted(runner.outputs) == [0, 1, 2]


def test_more_prompt_groups_than_fit_leave_no_block_owned(tmp_path: Path) -> None:
    prompts = [[group, 1, 2, 3, 4, 5, 6, 7, question] for group in range(12) for question in range(3)]
    runner = machine(
        tmp_path, prompts, max_new=4, block_size=2, budget=16, sequences=4, blocks=4 * 7, sharing=True, chunk=4
    )
    while not runner.scheduler.done:
        runner.step()
    runner.scheduler.check_integrity()
    assert runner.scheduler.pool.num_free == runner.scheduler.pool.num_blocks
    assert not runner.scheduler.pool.reference_counts.any()


def test_a_preempted_sequence_comes_back_from_the_tiers_without_computing_again(tmp_path: Path) -> None:
    mover = SymbolicMover(seed=0)
    mover.random = np.random.default_rng(3)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, row] for row in range(4)]
    runner = machine(
        tmp_path,
        prompts,
        max_new=9,
        block_size=4,
        budget=64,
        sequences=4,
        blocks=60,
        sharing=True,
        chunk=4,
        mover=mover,
    )
    steps = 0
    while not runner.scheduler.done:
        runner.step()
        running = runner.scheduler.table.running
        running = running[~runner.scheduler.table.is_restoring[running]]
        steps += 1
        if steps < 12 and running.size:
            runner.scheduler.preempt(int(running[0]))
    assert runner.outputs == {row: runner.expected(row) for row in range(4)}
    assert mover.num_loaded > 10


def test_shared_blocks_that_left_the_pool_come_back_instead_of_being_computed(tmp_path: Path) -> None:
    """Documents come by turns in the order of the rows, and the pool holds one and a half of them."""
    documents = [[10 * number + token % 7 for token in range(24)] for number in range(3)]
    prompts = [documents[row % 3] + [row] for row in range(12)]
    computed = {}
    for with_tiers in (False, True):
        mover = SymbolicMover(seed=1) if with_tiers else None
        if mover is not None:
            mover.save = _reliable_save(mover)  # type: ignore[method-assign]
            mover.pays = lambda num_blocks, *, recompute_tokens: True  # type: ignore[method-assign]
        folder = tmp_path / str(with_tiers)
        folder.mkdir()
        runner = machine(
            folder,
            prompts,
            max_new=2,
            block_size=4,
            budget=64,
            sequences=1,
            blocks=10,
            sharing=True,
            chunk=4,
            keep_order=True,
            mover=mover,
        )
        while not runner.scheduler.done:
            runner.step()
        assert runner.outputs == {row: runner.expected(row) for row in range(12)}
        computed[with_tiers] = runner.computed_rows
    assert computed[True] < computed[False] / 2


def test_the_last_in_the_plan_is_preempted_whatever_its_place_in_the_tree(tmp_path: Path) -> None:
    runner = machine(
        tmp_path,
        [[6 - row] * 4 for row in range(3)],
        max_new=4,
        block_size=4,
        budget=64,
        sequences=3,
        blocks=12,
        sharing=True,
        chunk=4,
        keep_order=True,
    )
    scheduler = runner.scheduler
    runner.step()
    position = scheduler.table.position.copy()
    # Each row wants a second block, and somebody else has all that are free.
    taken = scheduler.pool.allocate(scheduler.pool.num_free)
    assert [int(position[slot]) for slot in scheduler.schedule().preempted] == [2, 1]
    scheduler.pool.release(taken)


def _reliable_save(mover: SymbolicMover) -> Callable[..., bool]:
    def save(key: bytes, block: int, **_: object) -> bool:
        mover.kept[key] = mover.contents(block)
        return True

    return save
