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
from batchllm.engine.offload import BlockMover, Offload, Restorable
from batchllm.engine.residency import PrefixHit, TreeResidency
from batchllm.engine.sequences import SequenceTable
from batchllm.plan.lifetime import NextUses
from batchllm.plan.plan import Plan

_LOOKAHEAD = 64
"""Waiting prompts a step looks at behind one that must wait for a block to copy: enough to fill a step with other documents."""


@dataclass(frozen=True, slots=True)
class WaitingSequence:
    """A sequence to admit: `tokens` is the prompt and what it had generated when it was preempted.

    `saved_tokens`: of these, leading ones whose KV was offered to the tiers at its preemption.
    """

    position: int
    tokens: np.ndarray
    prompt_length: int
    max_tokens: int
    saved_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvTiers:
    """Where blocks go that leave the pool early. `root` is the key before a first block; `persist` keeps shared blocks for later runs."""

    mover: BlockMover
    root: bytes
    persist: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_step_tokens` rows a step, at most; `max_sequences` run at once; `max_context` bounds prompt and completion together.

    `evict_least_recent`: shared blocks leave the pool by recency, for comparison, not by next use.
    """

    block_size: int
    max_step_tokens: int
    max_sequences: int
    max_context: int
    evict_least_recent: bool = False


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
        plan: Plan,
        num_blocks: int,
        load: Callable[[int], WaitingSequence | None],
        on_preempt: Callable[[int], None] = lambda slot: None,
        tiers: KvTiers | None = None,
    ) -> None:
        """`load(position)` reads the sequence at a plan position; None for one that cannot run and was answered already.

        `on_preempt(slot)` is told before a running sequence leaves its slot. `tiers` take what leaves the pool too early.
        """
        self.config = config
        self.pool = BlockPool(num_blocks)
        self._offload = None
        if tiers is not None:
            self._offload = Offload(
                mover=tiers.mover,
                root=tiers.root,
                tree=plan.tree,
                pool=self.pool,
                block_size=config.block_size,
                persist=tiers.persist,
            )
        self.residency = TreeResidency(
            tree=plan.tree,
            pool=self.pool,
            block_size=config.block_size,
            next_uses=NextUses(plan.tree, plan.tree_position),
            offload=self._offload,
            evict_least_recent=config.evict_least_recent,
        )
        max_blocks = num_blocks_for(config.max_context, config.block_size)
        self.table = SequenceTable(
            max_sequences=config.max_sequences, max_blocks=max_blocks, max_context=config.max_context + 1
        )
        self.shared_rows_end = np.zeros(config.max_sequences, dtype=np.int32)
        """By slot: rows before this position read KV that other owners share; they must not be written again."""
        self.cached_tokens = np.zeros(config.max_sequences, dtype=np.int32)
        """By slot: tokens that were not computed for this sequence since its last admission."""
        self.restored_tokens = np.zeros(config.max_sequences, dtype=np.int32)
        """By slot: of these, tokens whose KV came from a tier."""
        self._paths: dict[int, list[int]] = {}
        self._copy_sources: list[int] = []
        self._load = load
        self._on_preempt = on_preempt
        self._tree_position = plan.tree_position
        self._num_positions = plan.num_prompts
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
        self._settle()
        step = ScheduledStep(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
        self._take_restored(0.0)
        decoding = self._grow_decoding(step)
        table = self.table
        running = table.running
        budget = self.config.max_step_tokens - decoding.size
        chunks: list[tuple[int, int]] = []
        for slot in running[~self._is_decoding(running) & ~table.is_restoring[running]]:
            if budget == 0:
                break
            count = min(int(table.num_tokens[slot] - table.num_computed[slot]), budget)
            chunks.append((int(slot), count))
            self._write(int(slot), count)
            budget -= count
        if not step.preempted:
            self._admit(step, chunks, budget)
        self.residency.prefetch(self._next_position)
        table.num_computed[decoding] += 1
        chunks.sort(key=lambda chunk: int(table.rank[chunk[0]]))
        step.num_decode = decoding.size
        step.slots = np.concatenate([decoding, np.array([slot for slot, _ in chunks], dtype=np.int64)])
        step.num_rows = np.concatenate(
            [np.ones(decoding.size, dtype=np.int64), np.array([count for _, count in chunks], dtype=np.int64)]
        )
        return step

    def wait(self, timeout_s: float) -> None:
        """Nothing can run before a transfer ends: waits for one, up to `timeout_s`."""
        if self._offload is not None:
            self._take_restored(timeout_s)

    @property
    def num_in_flight(self) -> int:
        """Sequences whose blocks are on their way from a tier, and blocks on their way to one."""
        return 0 if self._offload is None else self._offload.num_restoring + self._offload.num_pinned

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """The tokens sampled by the last step for `slots`."""
        self.table.append_tokens(slots, token_ids)

    def hold(self, slots: np.ndarray) -> None:
        """These sequences run no more: their last token is on its way, and they end when it is there."""
        self.table.is_restoring[slots] = True

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
        assert not self.table.is_restoring[slot], "its blocks are being written"
        self._on_preempt(slot)
        self._settle()
        table = self.table
        computed, path = int(table.num_computed[slot]), self._paths.pop(slot)
        sequence = WaitingSequence(
            position=int(table.position[slot]),
            tokens=table.tokens[slot, : table.num_tokens[slot]].copy(),
            prompt_length=int(table.prompt_length[slot]),
            max_tokens=int(table.max_tokens[slot]),
            saved_tokens=0 if self._offload is None else computed,
        )
        self.residency.readmit(path)
        if self._offload is not None:
            # What it shares the tree keeps, and saves if it must go; the rest is saved here.
            self.residency.register(
                path, table=table.block_table[slot], tokens=sequence.tokens, start=0, stop=computed, step=self._step
            )
            self._settle()
            self._offload.save_sequence(
                path, tokens=sequence.tokens[:computed], blocks=table.blocks(slot), position=sequence.position
            )
        self._leave(slot)
        table.remove(np.array([slot]))
        heapq.heappush(self._preempted, (sequence.position, sequence))
        return sequence

    def _settle(self) -> None:
        """The planned step has run: what was held for it is let go."""
        for block in self._copy_sources:
            self.pool.release(np.array([block], dtype=np.int32))
        self._copy_sources.clear()
        self.residency.settle()

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
            self._settle()
            num_pinned = 0 if self._offload is None else self._offload.num_pinned
            num_references = int(self.pool.reference_counts.sum())
            assert num_references == num_pinned, f"{num_references} references to blocks, {num_pinned} are pins"

    def _is_decoding(self, slots: np.ndarray) -> np.ndarray:
        """By slot: whether all but its last, generated token is computed. A prompt's own last token belongs to its prefill."""
        table = self.table
        lacks_one = table.num_tokens[slots] - table.num_computed[slots] == 1
        return lacks_one & (table.num_tokens[slots] > table.prompt_length[slots]) & ~table.is_restoring[slots]

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
            self.residency.evict(needy.size, keep=set(), position=self._next_position)
            if needy.size <= self.pool.num_free:
                break
            victim = int(running[~table.is_restoring[running]][-1])
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
                self.residency.evict(self.pool.num_blocks, keep=set(), position=self._next_position)
                hit, room = PrefixHit(0, []), self.pool.num_free == self.pool.num_blocks
            if not room:
                still_deferred.append(sequence)
                break
            restorable = self._find_in_tiers(sequence, path, hit)
            if restorable is not None and self._offload is not None and self._offload.is_arriving(restorable):
                still_deferred.append(sequence)
                continue
            slot = self._place(step, sequence, path, hit, restorable)
            reserve += growth
            if restorable is not None:
                # Blocks in host memory are there at once.
                self._take_restored(0.0)
            if not self.table.is_restoring[slot]:
                count = min(int(self.table.num_tokens[slot] - self.table.num_computed[slot]), budget)
                chunks.append((slot, count))
                self._write(slot, count)
                budget -= count
            self.residency.admit(path)
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
            self.residency.evict(wanted, keep=set(path), position=self._next_position)
        return self.pool.num_free >= wanted

    def _find_in_tiers(self, sequence: WaitingSequence, path: list[int], hit: PrefixHit) -> Restorable | None:
        """What the tiers add to a hit; None where they have nothing better than what the pool has."""
        if self._offload is None:
            return None
        restorable = self._offload.find(
            path, tokens=sequence.tokens, saved_tokens=sequence.saved_tokens, num_blocks=len(hit.blocks)
        )
        return restorable if restorable.keys and restorable.num_tokens > hit.num_tokens else None

    def _place(
        self,
        step: ScheduledStep,
        sequence: WaitingSequence,
        path: list[int],
        hit: PrefixHit,
        restorable: Restorable | None,
    ) -> int:
        """A slot and blocks for the sequence; begins to fill them from the tiers where `restorable` says so."""
        table = self.table
        slot = table.add(
            position=sequence.position,
            rank=int(self._tree_position[sequence.position]),
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
        step.admitted.append(slot)
        self.restored_tokens[slot] = 0
        if restorable is not None and self._offload is not None:
            table.is_restoring[slot] = True
            self.cached_tokens[slot] = shared.size * self.config.block_size
            self._offload.begin_restore(slot, restorable, blocks=own, blocks_before=shared.size)
            return slot
        if hit.copy_from >= 0:
            step.copies.append((hit.copy_from, int(own[0])))
            # Held until the copy is done: a freed block could be given to a sequence whose blocks come from a tier at once.
            self._copy_sources.append(hit.copy_from)
            self.pool.share(np.array([hit.copy_from], dtype=np.int32))
        self._count_as_there(slot, hit.num_tokens)
        return slot

    def _count_as_there(self, slot: int, num_tokens: int) -> None:
        """The first `num_tokens` of a sequence are in its blocks. The last token is always computed: it is run for its logits."""
        table = self.table
        cached = min(num_tokens, int(table.num_tokens[slot]) - 1)
        table.num_computed[slot] = cached
        self.cached_tokens[slot] = cached
        self.shared_rows_end[slot] = num_tokens

    def _take_restored(self, timeout_s: float) -> None:
        """Sequences whose blocks have come from the tiers can run, and the tree shares what they brought."""
        if self._offload is None:
            return
        for slot, num_tokens in self._offload.poll(timeout_s):
            before = int(self.cached_tokens[slot])
            self.table.is_restoring[slot] = False
            self._count_as_there(slot, num_tokens)
            self.restored_tokens[slot] = max(0, int(self.cached_tokens[slot]) - before)
            self.residency.register(
                self._paths[slot],
                table=self.table.block_table[slot],
                tokens=self.table.tokens[slot],
                start=before,
                stop=num_tokens,
                step=self._step,
            )

    def _write(self, slot: int, count: int) -> None:
        """Counts a chunk of `count` rows as computed and lets the tree take the blocks it completes."""
        table = self.table
        start = int(table.num_computed[slot])
        table.num_computed[slot] += count
        self.residency.register(
            self._paths[slot],
            table=table.block_table[slot],
            tokens=table.tokens[slot],
            start=start,
            stop=start + count,
            step=self._step,
        )
