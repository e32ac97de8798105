"""What the next step computes: which sequences run, how far each prompt is prefilled, who is admitted, who is preempted. No torch.

Each step, under a budget of `max_step_tokens` rows: first every running sequence that decodes gets its row, then prompts under way go on
in chunks, then waiting prompts are admitted in plan order. A prompt is admitted when its blocks are there and the growth that the
running ones are expected to need stays free. When a decoding sequence finds no block, the tree gives back what is needed last, and
then the running sequence that comes last in the plan is preempted: its blocks go, its tokens stay, and it is admitted again later.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from batchllm.engine.blocks import BlockPool, num_blocks_for
from batchllm.engine.residency import PrefixHit, TreeResidency
from batchllm.engine.sequences import SequenceTable
from batchllm.plan.tree import PrefixTree

_LOOKAHEAD = 64
"""Waiting prompts a step looks at behind one that must wait for a block to copy: enough to fill a step with other documents."""


@dataclass(frozen=True, slots=True)
class WaitingSequence:
    """A sequence to admit: `tokens` is the prompt and what it had generated when it was preempted."""

    position: int
    tokens: np.ndarray
    prompt_length: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_step_tokens` rows a step, at most; `max_sequences` run at once; `max_context` bounds prompt and completion together."""

    block_size: int
    max_step_tokens: int
    max_sequences: int
    max_context: int


@dataclass(slots=True)
class ScheduledStep:
    """The rows of one step: row counts by slot, decoding ones (one row) first, then prefill chunks; each part in plan order.

    `copies`: (source block, target block), to be done before the step. `admitted`: slots new in this step.
    """

    slots: np.ndarray
    num_rows: np.ndarray
    num_decode: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


class Scheduler:
    """Owns the block pool, the tree's residency and the sequence table."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        tree: PrefixTree,
        num_positions: int,
        num_blocks: int,
        load: Callable[[int], WaitingSequence | None],
        on_preempt: Callable[[int], None] = lambda slot: None,
    ) -> None:
        """`load(position)` reads the sequence at a plan position; None for one that cannot run and was answered already.

        `on_preempt(slot)` is told before a running sequence leaves its slot.
        """
        self.config = config
        self.pool = BlockPool(num_blocks)
        self.residency = TreeResidency(tree=tree, pool=self.pool, block_size=config.block_size)
        max_blocks = num_blocks_for(config.max_context, config.block_size)
        self.table = SequenceTable(
            max_sequences=config.max_sequences, max_blocks=max_blocks, max_context=config.max_context + 1
        )
        self.shared_rows_end = np.zeros(config.max_sequences, dtype=np.int32)
        """By slot: rows before this position read KV that other owners share; they must not be written again."""
        self.cached_tokens = np.zeros(config.max_sequences, dtype=np.int32)
        """By slot: prompt tokens that were not computed for this sequence since its last admission."""
        self._paths: dict[int, list[int]] = {}
        self._load = load
        self._on_preempt = on_preempt
        self._num_positions = num_positions
        self._next_position = 0
        self._deferred: list[WaitingSequence] = []
        self._preempted: list[tuple[int, WaitingSequence]] = []
        self._step = 0
        self.num_allocated = 0
        """Blocks handed out so far."""
        self.num_unfilled_slots = 0
        """Token slots of blocks given back that never held a token."""
        self._expected_share = 1.0
        """Completion tokens of finished sequences over those they were allowed: how much growth to reserve."""
        self._finished_tokens = 0
        self._finished_allowed = 0

    @property
    def num_waiting(self) -> int:
        return self._num_positions - self._next_position + len(self._deferred) + len(self._preempted)

    @property
    def done(self) -> bool:
        return self.num_waiting == 0 and self.table.num_running == 0

    def schedule(self) -> ScheduledStep:
        """The next step. Its rows count as computed from here on; the caller runs it, then calls `append` for sampled tokens."""
        self._step += 1
        step = ScheduledStep(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
        decoding = self._grow_decoding(step)
        table = self.table
        running = table.running
        budget = self.config.max_step_tokens - decoding.size
        chunks: list[tuple[int, int]] = []
        for slot in running[~self._is_decoding(running)]:
            if budget == 0:
                break
            count = min(int(table.num_tokens[slot] - table.num_computed[slot]), budget)
            chunks.append((int(slot), count))
            self._write(int(slot), count)
            budget -= count
        if not step.preempted:
            self._admit(step, chunks, budget)
        table.num_computed[decoding] += 1
        chunks.sort(key=lambda chunk: int(table.position[chunk[0]]))
        step.num_decode = decoding.size
        step.slots = np.concatenate([decoding, np.array([slot for slot, _ in chunks], dtype=np.int64)])
        step.num_rows = np.concatenate(
            [np.ones(decoding.size, dtype=np.int64), np.array([count for _, count in chunks], dtype=np.int64)]
        )
        return step

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """The tokens sampled by the last step for `slots`."""
        self.table.append_tokens(slots, token_ids)

    def finish(self, slots: np.ndarray) -> None:
        """These sequences are done: their blocks and slots are free again."""
        table = self.table
        self._finished_tokens += int((table.num_tokens[slots] - table.prompt_length[slots]).sum())
        self._finished_allowed += int((table.max_tokens[slots] - table.prompt_length[slots]).sum())
        if self._finished_allowed:
            self._expected_share = self._finished_tokens / self._finished_allowed
        for slot in slots:
            self._leave(int(slot))
            self._paths.pop(int(slot))
        table.remove(slots)

    def preempt(self, slot: int) -> WaitingSequence:
        """Takes a running sequence off the machine; it keeps its tokens and waits for admission again."""
        self._on_preempt(slot)
        table = self.table
        sequence = WaitingSequence(
            position=int(table.position[slot]),
            tokens=table.tokens[slot, : table.num_tokens[slot]].copy(),
            prompt_length=int(table.prompt_length[slot]),
            max_tokens=int(table.max_tokens[slot]),
        )
        self.residency.readmit(self._paths.pop(slot))
        self._leave(slot)
        table.remove(np.array([slot]))
        heapq.heappush(self._preempted, (sequence.position, sequence))
        return sequence

    def _leave(self, slot: int) -> None:
        table = self.table
        self.num_unfilled_slots += int(table.num_blocks[slot]) * self.config.block_size - int(table.num_computed[slot])
        self.pool.release(table.blocks(slot))

    def _allocate(self, count: int) -> np.ndarray:
        self.num_allocated += count
        return self.pool.allocate(count)

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks or references do not add up; when nothing runs or waits, all must be free."""
        self.pool.check_integrity()
        if self.done:
            assert self.pool.num_free == self.pool.num_blocks, f"{self.pool.num_used} blocks are still owned"

    def _is_decoding(self, slots: np.ndarray) -> np.ndarray:
        """By slot: whether all but its last, generated token is computed. A prompt's own last token belongs to its prefill."""
        table = self.table
        lacks_one = table.num_tokens[slots] - table.num_computed[slots] == 1
        return lacks_one & (table.num_tokens[slots] > table.prompt_length[slots])

    def _grow_decoding(self, step: ScheduledStep) -> np.ndarray:
        """The slots that decode, each with a block for its row; preempts from the end of the plan until they fit.

        A batch wider than the budget decodes the earliest in the plan: they finish first and make room.
        """
        table, size = self.table, self.config.block_size
        while True:
            running = table.running
            decoding = running[self._is_decoding(running)][: self.config.max_step_tokens]
            needy = decoding[table.num_computed[decoding] // size >= table.num_blocks[decoding]]
            if needy.size <= self.pool.num_free:
                break
            self.residency.evict(needy.size, keep=set())
            if needy.size <= self.pool.num_free:
                break
            victim = int(table.running[-1])
            step.preempted.append(victim)
            self.preempt(victim)
        if needy.size:
            blocks = self._allocate(needy.size)
            table.block_table[needy, table.num_blocks[needy]] = blocks
            table.num_blocks[needy] += 1
        return decoding

    def _admit(self, step: ScheduledStep, chunks: list[tuple[int, int]], budget: int) -> None:
        """Admits waiting sequences in plan order while rows, slots and blocks last."""
        still_deferred: list[WaitingSequence] = []
        queue = self._deferred
        queue.reverse()
        reserve = self._reserved_growth()
        while budget > 0 and self.table.has_room and len(still_deferred) < _LOOKAHEAD:
            sequence = self._next_waiting(queue)
            if sequence is None:
                break
            path = self.residency.path(sequence.position)
            hit = self.residency.find(path, step=self._step)
            if hit.wait:
                still_deferred.append(sequence)
                continue
            growth = self._expected_growth(sequence)
            room = self._make_room(sequence, path, hit, reserve + growth)
            if not room and self.table.num_running == 0:
                # Alone it needs no reserve, and may take the place of its own prefixes: its size was checked against the pool.
                self.residency.evict(self.pool.num_blocks, keep=set())
                hit, room = PrefixHit(0, []), True
            if not room:
                still_deferred.append(sequence)
                break
            slot = self._place(step, sequence, path, hit)
            reserve += growth
            count = min(int(self.table.num_tokens[slot] - self.table.num_computed[slot]), budget)
            chunks.append((slot, count))
            self._write(slot, count)
            self.residency.admit(path)
            budget -= count
        queue.reverse()
        self._deferred = still_deferred + queue

    def _next_waiting(self, deferred: list[WaitingSequence]) -> WaitingSequence | None:
        """Preempted sequences come back first, then those that waited for a block, then the plan's next."""
        if self._preempted:
            return heapq.heappop(self._preempted)[1]
        if deferred:
            return deferred.pop()
        while self._next_position < self._num_positions:
            sequence = self._load(self._next_position)
            position, self._next_position = self._next_position, self._next_position + 1
            if sequence is not None:
                return sequence
            self.residency.admit(self.residency.path(position))
        return None

    def _expected_growth(self, sequence: WaitingSequence) -> int:
        allowed = sequence.max_tokens - sequence.tokens.size
        return num_blocks_for(int(allowed * self._expected_share), self.config.block_size)

    def _reserved_growth(self) -> int:
        """Blocks that the running sequences are expected to need still."""
        table = self.table
        allowed = table.max_tokens[table.running] - table.num_tokens[table.running]
        blocks = -(-(allowed * self._expected_share).astype(np.int64) // self.config.block_size)
        return int(blocks.sum())

    def _make_room(self, sequence: WaitingSequence, path: list[int], hit: PrefixHit, reserve: int) -> bool:
        """Whether the sequence's own blocks, and the reserve, are free, evicting idle tree blocks of others if they must go."""
        wanted = num_blocks_for(sequence.tokens.size, self.config.block_size) - len(hit.blocks) + reserve
        if self.pool.num_free < wanted:
            self.residency.evict(wanted, keep=set(path))
        return self.pool.num_free >= wanted

    def _place(self, step: ScheduledStep, sequence: WaitingSequence, path: list[int], hit: PrefixHit) -> int:
        table = self.table
        slot = table.add(
            position=sequence.position,
            tokens=sequence.tokens,
            prompt_length=sequence.prompt_length,
            max_tokens=sequence.max_tokens,
        )
        self._paths[slot] = path
        shared = np.array(hit.blocks, dtype=np.int32)
        self.pool.share(shared)
        table.append_blocks(slot, shared)
        own = self._allocate(num_blocks_for(sequence.tokens.size, self.config.block_size) - shared.size)
        table.append_blocks(slot, own)
        if hit.copy_from >= 0:
            step.copies.append((hit.copy_from, int(own[0])))
        # The last token is always computed: its logits are what the sequence is run for.
        cached = min(hit.num_tokens, sequence.tokens.size - 1)
        table.num_computed[slot] = cached
        self.cached_tokens[slot] = cached
        self.shared_rows_end[slot] = hit.num_tokens
        step.admitted.append(slot)
        return slot

    def _write(self, slot: int, count: int) -> None:
        """Counts a chunk of `count` rows as computed and lets the tree take the blocks it completes."""
        table = self.table
        start = int(table.num_computed[slot])
        table.num_computed[slot] += count
        self.residency.register(
            self._paths[slot], table=table.block_table[slot], start=start, stop=start + count, step=self._step
        )
