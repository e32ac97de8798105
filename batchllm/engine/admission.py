"""Who runs next: waiting sequences in plan order, admitted while rows, slots and blocks last and the growth of the running ones stays free."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from batchllm.engine.blocks import num_blocks_for
from batchllm.engine.holdings import Holdings, WaitingSequence
from batchllm.engine.pacing import Pacing
from batchllm.engine.residency import PrefixHit
from batchllm.engine.scheduled import ScheduledStep

_LOOKAHEAD = 64
"""Waiting prompts a step looks at behind one that must wait for a block to copy: enough to fill a step with other documents."""


class Admission:
    """Owns the queue of those that wait."""

    def __init__(
        self,
        *,
        holdings: Holdings,
        block_size: int,
        num_positions: int,
        load: Callable[[int], WaitingSequence | None],
        pacing: Pacing | None = None,
    ) -> None:
        """`load(position)` reads the sequence at a plan position; None for one that cannot run and was answered already. `pacing`: how many run
        at once; None: as many as there is room for.
        """
        self._holdings = holdings
        self._block_size = block_size
        self._load = load
        self._pacing = pacing
        self._num_positions = num_positions
        self.next_position = 0
        """The plan position that is read next."""
        self._deferred: list[WaitingSequence] = []
        self._preempted: list[tuple[int, WaitingSequence]] = []
        self._expected_share = 1.0
        """Completion tokens of finished sequences over those they were allowed: how much growth to reserve."""
        self._finished_tokens = 0
        self._finished_allowed = 0

    @property
    def num_waiting(self) -> int:
        return self._num_positions - self.next_position + len(self._deferred) + len(self._preempted)

    def admit(self, step: ScheduledStep, chunks: list[tuple[int, int]], budget: int) -> None:
        """Admits waiting sequences while `budget` rows last; adds to `chunks` what each computes in this step."""
        if not self.num_waiting:
            return
        holdings = self._holdings
        table, residency = holdings.table, holdings.residency
        still_deferred: list[WaitingSequence] = []
        queue = self._deferred
        queue.reverse()
        reserve = self._reserved_growth()
        most_running = self._most_running()
        while budget > 0 and table.num_running < most_running and len(still_deferred) < _LOOKAHEAD:
            sequence = self._next(queue)
            if sequence is None:
                break
            path = residency.path(sequence.position)
            hit = residency.find(path, step=holdings.step)
            if hit.wait:
                still_deferred.append(sequence)
                continue
            growth = self._expected_growth(sequence)
            room = self._make_room(sequence, path, hit, reserve + growth)
            if not room and table.num_running == 0:
                # Alone it needs no reserve, and may take the place of its own prefixes: its size was checked against the pool.
                residency.evict(holdings.pool.num_blocks, keep=set(), position=self.next_position)
                hit, room = PrefixHit(0, []), holdings.pool.num_free == holdings.pool.num_blocks
            if not room:
                still_deferred.append(sequence)
                break
            restorable = holdings.find_in_tiers(sequence, path, hit)
            if restorable is not None and holdings.offload is not None and holdings.offload.is_arriving(restorable):
                still_deferred.append(sequence)
                continue
            slot = holdings.place(step, sequence, path, hit, restorable)
            reserve += growth
            if restorable is not None:
                # Blocks in host memory are there at once.
                holdings.take_restored(0.0)
            if not table.is_restoring[slot]:
                count = min(int(table.num_tokens[slot] - table.num_computed[slot]), budget)
                chunks.append((slot, count))
                holdings.write(slot, count)
                budget -= count
            residency.admit(path)
            if self._pacing is not None:
                self._pacing.begin(slot, step=holdings.step)
        queue.reverse()
        self._deferred = still_deferred + queue

    def put_back(self, sequence: WaitingSequence) -> None:
        """A preempted sequence waits again."""
        heapq.heappush(self._preempted, (sequence.position, sequence))

    def note_finished(self, slots: np.ndarray) -> None:
        """These sequences are done: how much of what they were allowed they took tells what others will take."""
        table = self._holdings.table
        if self._pacing is not None:
            self._pacing.finish(slots, step=self._holdings.step)
        self._finished_tokens += int((table.num_tokens[slots] - table.prompt_length[slots]).sum())
        self._finished_allowed += int((table.max_tokens[slots] - table.prompt_length[slots]).sum())
        if self._finished_allowed:
            self._expected_share = self._finished_tokens / self._finished_allowed

    def _next(self, deferred: list[WaitingSequence]) -> WaitingSequence | None:
        """Preempted sequences come back first, then those that waited for a block, then the plan's next."""
        if self._preempted:
            return heapq.heappop(self._preempted)[1]
        if deferred:
            return deferred.pop()
        residency = self._holdings.residency
        while self.next_position < self._num_positions:
            sequence = self._load(self.next_position)
            position, self.next_position = self.next_position, self.next_position + 1
            if sequence is not None:
                return sequence
            residency.admit(residency.path(position))
        return None

    def _most_running(self) -> int:
        if self._pacing is None or not self.num_waiting:
            return self._holdings.table.max_sequences
        put_back = [*self._deferred, *(sequence for _, sequence in self._preempted)]
        return self._pacing.most_running(
            next_position=self.next_position,
            tokens_put_back=sum(sequence.max_tokens - sequence.tokens.size for sequence in put_back),
            step=self._holdings.step,
        )

    def _expected_growth(self, sequence: WaitingSequence) -> int:
        allowed = sequence.max_tokens - sequence.tokens.size
        return num_blocks_for(int(allowed * self._expected_share), self._block_size)

    def _reserved_growth(self) -> int:
        """Blocks that the running sequences are expected to need still."""
        table = self._holdings.table
        allowed = table.max_tokens[table.running] - table.num_tokens[table.running]
        blocks = -(-(allowed * self._expected_share).astype(np.int64) // self._block_size)
        return int(blocks.sum())

    def _make_room(self, sequence: WaitingSequence, path: list[int], hit: PrefixHit, reserve: int) -> bool:
        """Whether the sequence's own blocks, and the reserve, are free, evicting idle tree blocks of others if they must go."""
        pool = self._holdings.pool
        wanted = num_blocks_for(sequence.tokens.size, self._block_size) - len(hit.blocks) + reserve
        if pool.num_free < wanted:
            self._holdings.residency.evict(wanted, keep=set(path), position=self.next_position)
        return pool.num_free >= wanted
