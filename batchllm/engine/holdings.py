"""What running sequences hold: their rows in the table, their blocks in the pool, what they share in the tree, what the tiers give back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchllm.engine.blocks import BlockPool, num_blocks_for
from batchllm.engine.offload import BlockMover, Offload, Restorable, StageReuse
from batchllm.engine.residency import PrefixHit, TreeResidency
from batchllm.engine.scheduled import ScheduledStep
from batchllm.engine.sequences import SequenceTable
from batchllm.planner.lifetime import NextUses
from batchllm.planner.plan import Plan


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
    reuse: StageReuse = StageReuse()


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


class Holdings:
    """Owns the block pool, the tree's residency and the sequence table; the scheduler decides, this keeps the books."""

    def __init__(self, *, config: SchedulerConfig, plan: Plan, num_blocks: int, tiers: KvTiers | None) -> None:
        self.pool = BlockPool(num_blocks)
        self.offload = None
        if tiers is not None:
            self.offload = Offload(
                mover=tiers.mover,
                root=tiers.root,
                tree=plan.tree,
                pool=self.pool,
                block_size=config.block_size,
                persist=tiers.persist,
                reuse=tiers.reuse,
            )
        self.residency = TreeResidency(
            tree=plan.tree,
            pool=self.pool,
            block_size=config.block_size,
            next_uses=NextUses(plan.tree, plan.tree_position),
            offload=self.offload,
            evict_least_recent=config.evict_least_recent,
        )
        # No sequence grows longer. A step writes to each row: narrow ones lie on fewer pages.
        most_tokens = plan.prompt_tokens.astype(np.int64) + plan.decode_tokens
        longest = int(np.minimum(most_tokens, config.max_context).max(initial=1))
        self.table = SequenceTable(
            max_sequences=config.max_sequences,
            max_blocks=num_blocks_for(longest, config.block_size),
            max_tokens=longest + 1,
        )
        self.shared_rows_end = np.zeros(config.max_sequences, dtype=np.int32)
        """By slot: rows before this position read KV that other owners share; they must not be written again."""
        self.cached_tokens = np.zeros(config.max_sequences, dtype=np.int32)
        """By slot: tokens that were not computed for this sequence since its last admission."""
        self.restored_tokens = np.zeros(config.max_sequences, dtype=np.int32)
        """By slot: of these, tokens whose KV came from a tier."""
        self.num_allocated = 0
        """Blocks handed out so far."""
        self.num_unfilled_slots = 0
        """Token slots of blocks given back that never held a token."""
        self.step = 0
        """The number of the step that is being planned."""
        self._block_size = config.block_size
        self._tree_position = plan.tree_position
        self._paths: dict[int, list[int]] = {}
        self._copy_sources: list[int] = []

    def place(
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
        own = self.allocate(num_blocks_for(sequence.tokens.size, self._block_size) - shared.size)
        table.append_blocks(slot, own)
        step.admitted.append(slot)
        self.restored_tokens[slot] = 0
        if restorable is not None and self.offload is not None:
            table.is_restoring[slot] = True
            self.cached_tokens[slot] = shared.size * self._block_size
            self.offload.begin_restore(slot, restorable, blocks=own, blocks_before=shared.size)
            return slot
        if hit.copy_from >= 0:
            step.copies.append((hit.copy_from, int(own[0])))
            # Held until the copy is done: a freed block could be given to a sequence whose blocks come from a tier at once.
            self._copy_sources.append(hit.copy_from)
            self.pool.share(np.array([hit.copy_from], dtype=np.int32))
        self._count_as_there(slot, hit.num_tokens)
        return slot

    def allocate(self, count: int) -> np.ndarray:
        """`count` free blocks; the caller has checked that there are so many."""
        self.num_allocated += count
        return self.pool.allocate(count)

    def write(self, slot: int, count: int) -> None:
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
            step=self.step,
        )

    def hold_drafts(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Blocks for `counts` more rows behind the next of each decoding sequence, from those that are free: as many rows as have room."""
        table, size = self.table, self._block_size
        held = table.num_blocks[slots].astype(np.int64)
        needed = np.maximum(-(-(table.num_computed[slots] + 1 + counts) // size) - held, 0)
        has_room = np.cumsum(needed) <= self.pool.num_free
        counts = np.where(has_room, counts, np.minimum(counts, held * size - table.num_computed[slots] - 1))
        needed = np.where(has_room, needed, 0)
        num_needed = int(needed.sum())
        if num_needed:
            table.append_blocks_each(slots, needed, self.allocate(num_needed))
        return counts

    def drop_drafts(self, slots: np.ndarray) -> None:
        """The drafted rows of `slots` were run and sampled: what was not appended is not there, and its blocks go back."""
        table = self.table
        table.num_computed[slots] = np.minimum(table.num_computed[slots], table.num_tokens[slots] - 1)
        kept = -(-table.num_computed[slots] // self._block_size)
        surplus = table.take_blocks_each(slots, table.num_blocks[slots] - kept)
        self.num_allocated -= surplus.size
        self.pool.release(surplus)

    def find_in_tiers(self, sequence: WaitingSequence, path: list[int], hit: PrefixHit) -> Restorable | None:
        """What the tiers add to a hit; None where they have nothing better than what the pool has."""
        if self.offload is None:
            return None
        saved_tokens = max(sequence.saved_tokens, self.offload.tokens_to_find(sequence.prompt_length))
        restorable = self.offload.find(
            path, tokens=sequence.tokens, saved_tokens=saved_tokens, num_blocks=len(hit.blocks)
        )
        return restorable if restorable.keys and restorable.num_tokens > hit.num_tokens else None

    def take_restored(self, timeout_s: float) -> None:
        """Sequences whose blocks have come from the tiers can run, and the tree shares what they brought."""
        if self.offload is None or not self.offload.may_be_moving:
            return
        for slot, num_tokens in self.offload.poll(timeout_s):
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
                step=self.step,
            )

    def preempt(self, slot: int) -> WaitingSequence:
        """Takes a running sequence out of the table; it keeps its tokens, and the tiers are offered its blocks."""
        self.settle()
        table = self.table
        computed, path = int(table.num_computed[slot]), self._paths[slot]
        sequence = WaitingSequence(
            position=int(table.position[slot]),
            tokens=table.tokens[slot, : table.num_tokens[slot]].copy(),
            prompt_length=int(table.prompt_length[slot]),
            max_tokens=int(table.max_tokens[slot]),
            saved_tokens=0 if self.offload is None else computed,
        )
        self.residency.readmit(path)
        if self.offload is not None:
            # What it shares the tree keeps, and saves if it must go; the rest is saved here.
            self.residency.register(
                path, table=table.block_table[slot], tokens=sequence.tokens, start=0, stop=computed, step=self.step
            )
            self.settle()
            self.offload.save_sequence(
                path, tokens=sequence.tokens[:computed], blocks=table.blocks(slot), position=sequence.position
            )
        self.remove(np.array([slot]))
        return sequence

    def finish(self, slots: np.ndarray) -> None:
        """These sequences are done: the tiers are offered what the next stage goes on with, and the rest is given back."""
        table = self.table
        if self.offload is not None:
            for slot in slots.tolist():
                self.offload.save_finished(
                    self._paths[slot],
                    tokens=table.tokens[slot, : table.num_computed[slot]],
                    blocks=table.blocks(slot),
                    position=int(table.position[slot]),
                )
        self.remove(slots)

    def remove(self, slots: np.ndarray) -> None:
        """Gives back the blocks and the slots."""
        table = self.table
        held = table.num_blocks[slots]
        self.num_unfilled_slots += int((held * self._block_size - table.num_computed[slots]).sum())
        # Sequences may share blocks.
        self.pool.release_each(table.take_blocks_each(slots, held))
        for slot in slots.tolist():
            del self._paths[slot]
        table.remove(slots)

    def settle(self) -> None:
        """The planned step has run: what was held for it is let go."""
        if self._copy_sources:
            self.pool.release_each(np.array(self._copy_sources, dtype=np.int32))
            self._copy_sources.clear()
        self.residency.settle()

    def _count_as_there(self, slot: int, num_tokens: int) -> None:
        """The first `num_tokens` of a sequence are in its blocks. The last token is always computed: it is run for its logits."""
        table = self.table
        cached = min(num_tokens, int(table.num_tokens[slot]) - 1)
        table.num_computed[slot] = cached
        self.cached_tokens[slot] = cached
        self.shared_rows_end[slot] = num_tokens
