"""What the next step computes: which sequences run, how far each prompt is prefilled, who is admitted, who is preempted. No torch.

Each step, under a budget of `max_step_tokens` rows: first every running sequence that decodes gets its row, then prompts under way go on
in chunks, then waiting prompts are admitted in plan order. A prompt is admitted when its blocks are there and the growth that the
running ones are expected to need stays free. When a decoding sequence finds no block, the tree gives back what is needed last, and
then the running sequence that comes last in the plan is preempted: its blocks go, its tokens stay, and it is admitted again later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from batchllm.engine.admission import Admission
from batchllm.engine.drafts import Drafter
from batchllm.engine.holdings import Holdings, KvTiers, SchedulerConfig, WaitingSequence
from batchllm.engine.pacing import Pacing
from batchllm.engine.scheduled import ScheduledStep
from batchllm.planner.plan import Plan

Speculation = int | Literal["auto", "off"]


class Scheduler:
    """Decides each step over what the running sequences hold and who waits."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        plan: Plan,
        num_blocks: int,
        load: Callable[[int], WaitingSequence | None],
        on_preempt: Callable[[int], None] = lambda slot: None,
        tiers: KvTiers | None = None,
        speculation: Speculation = "off",
    ) -> None:
        """`load(position)` reads the sequence at a plan position; None for one that cannot run and was answered already.

        `on_preempt(slot)` is told before a running sequence leaves its slot. `tiers` take what leaves the pool too early.
        `speculation`: drafts that ride with decoding sequences: `off`, as many as pay (`auto`), or so many for each of them in every step.
        """
        self.config = config
        self.holdings = Holdings(config=config, plan=plan, num_blocks=num_blocks, tiers=tiers)
        self.pool = self.holdings.pool
        self.residency = self.holdings.residency
        self.table = self.holdings.table
        pacing = None
        if plan.width is not None:
            pacing = Pacing(table=self.table, decode_tokens=plan.decode_tokens, fewest=plan.width.fewest)
        self._admission = Admission(
            holdings=self.holdings,
            block_size=config.block_size,
            num_positions=plan.num_prompts,
            load=load,
            pacing=pacing,
        )
        self._on_preempt = on_preempt
        self.drafter = (
            None if speculation == "off" else Drafter(self.table, always=None if speculation == "auto" else speculation)
        )

    @property
    def num_waiting(self) -> int:
        return self._admission.num_waiting

    @property
    def done(self) -> bool:
        return self.num_waiting == 0 and self.table.num_running == 0

    def schedule(self) -> ScheduledStep:
        """The next step. Its rows count as computed from here on; the caller runs it, then calls `append` for sampled tokens."""
        holdings, table = self.holdings, self.table
        holdings.step += 1
        holdings.settle()
        step = ScheduledStep(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
        holdings.take_restored(0.0)
        decoding = self._grow_decoding(step)
        running = table.running
        num_rows = 1 + table.num_forced[decoding].astype(np.int64)
        budget = self.config.max_step_tokens - int(num_rows.sum())
        chunks: list[tuple[int, int]] = []
        others = running[:0]
        if decoding.size < running.size:
            others = running[~self._is_decoding(running) & ~table.is_restoring[running]]
        for slot in others:
            if budget == 0:
                break
            count = min(int(table.num_tokens[slot] - table.num_computed[slot]), budget)
            chunks.append((int(slot), count))
            holdings.write(int(slot), count)
            budget -= count
        if not step.preempted:
            self._admission.admit(step, chunks, budget)
        self.residency.prefetch(self._admission.next_position)
        num_drafted = self._draft(decoding, num_rows=num_rows, num_prefill=sum(count for _, count in chunks))
        step.num_forced = int(num_rows.sum()) - decoding.size
        table.num_forced[decoding] = 0
        num_rows += num_drafted
        table.num_computed[decoding] += num_rows
        chunks.sort(key=lambda chunk: int(table.rank[chunk[0]]))
        step.num_decode = decoding.size
        step.slots = np.concatenate([decoding, np.array([slot for slot, _ in chunks], dtype=np.int64)])
        step.num_rows = np.concatenate([num_rows, np.array([count for _, count in chunks], dtype=np.int64)])
        return step

    def _draft(self, decoding: np.ndarray, *, num_rows: np.ndarray, num_prefill: int) -> np.ndarray:
        """How many drafted tokens ride with each decoding sequence, int64; they are written behind its tokens, and have blocks. None ride
        beside forced ones.
        """
        table = self.table
        drafts = None
        if self.drafter is not None and decoding.size:
            drafts = self.drafter.propose(
                decoding,
                # The step gives one token more than are drafted.
                limits=np.where(num_rows == 1, table.max_tokens[decoding] - table.num_tokens[decoding] - 1, 0),
                num_rows=self.config.max_step_tokens - int(num_rows.sum()) - num_prefill,
                num_prefill=num_prefill,
            )
        if drafts is None:
            return np.zeros(decoding.size, dtype=np.int64)
        table.write_drafts(decoding, drafts.counts, drafts.token_ids)
        return self.holdings.hold_drafts(decoding, drafts.counts)

    def wait(self, timeout_s: float) -> None:
        """Nothing can run before a transfer ends: waits for one, up to `timeout_s`."""
        self.holdings.take_restored(timeout_s)

    @property
    def num_in_flight(self) -> int:
        """Sequences whose blocks are on their way from a tier, and blocks on their way to one."""
        offload = self.holdings.offload
        return 0 if offload is None else offload.num_restoring + offload.num_pinned

    def drop_drafts(self, slots: np.ndarray) -> None:
        """What the last step drafted for `slots`, and was not appended, is forgotten. Before `finish`."""
        self.holdings.drop_drafts(slots)

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """The next token of each of the distinct `slots`, sampled by the last step."""
        self.table.append_tokens(slots, token_ids)

    def append_forced(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """One more token for each of the distinct `slots`, which need not be sampled: the next step computes it too. Fewer than
        `max_step_tokens` of them behind a sampled one.
        """
        self.table.append_tokens(slots, token_ids)
        self.table.num_forced[slots] += 1

    def hold(self, slots: np.ndarray) -> None:
        """These sequences run no more: their last token is on its way, and they end when it is there."""
        self.table.is_restoring[slots] = True

    def finish(self, slots: np.ndarray) -> None:
        """These sequences are done: their blocks and slots are free again."""
        self._admission.note_finished(slots)
        self.holdings.finish(slots)

    def preempt(self, slot: int) -> WaitingSequence:
        """Takes a running sequence off the machine; it keeps its tokens and waits for admission again."""
        assert not self.table.is_restoring[slot], "its blocks are being written"
        self._on_preempt(slot)
        sequence = self.holdings.preempt(slot)
        self._admission.put_back(sequence)
        return sequence

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks or references do not add up; when nothing runs or waits, all must be free."""
        self.pool.check_integrity()
        if self.done:
            self.holdings.settle()
            offload = self.holdings.offload
            num_pinned = 0 if offload is None else offload.num_pinned
            num_references = int(self.pool.reference_counts.sum())
            assert num_references == num_pinned, f"{num_references} references to blocks, {num_pinned} are pins"

    def _is_decoding(self, slots: np.ndarray) -> np.ndarray:
        """By slot: whether all is computed but its last sampled token and what was forced behind it. A prompt's own last token belongs to
        its prefill.
        """
        table = self.table
        lacks_one = table.num_tokens[slots] - table.num_computed[slots] == 1 + table.num_forced[slots]
        return lacks_one & (table.num_tokens[slots] > table.prompt_length[slots]) & ~table.is_restoring[slots]

    def _grow_decoding(self, step: ScheduledStep) -> np.ndarray:
        """The slots that decode, each with blocks for its rows; preempts from the end of the plan until they fit.

        A batch wider than the budget decodes the earliest in the plan: they finish first and make room.
        """
        table, size = self.table, self.config.block_size
        while True:
            running = table.running
            decoding = running[self._is_decoding(running)]
            decoding = self._earliest(decoding)
            lacking = np.maximum(-(-table.num_tokens[decoding] // size) - table.num_blocks[decoding], 0)
            num_lacking = int(lacking.sum())
            if num_lacking <= self.pool.num_free:
                break
            self.residency.evict(num_lacking, keep=set(), position=self._admission.next_position)
            if num_lacking <= self.pool.num_free:
                break
            candidates = running[~table.is_restoring[running]]
            victim = int(candidates[table.position[candidates].argmax()])
            step.preempted.append(victim)
            self.preempt(victim)
        if num_lacking:
            table.append_blocks_each(decoding, lacking, self.holdings.allocate(num_lacking))
        return decoding

    def _earliest(self, decoding: np.ndarray) -> np.ndarray:
        """Of these slots those that come first in the plan, as many as the budget takes, in the order that they are given in."""
        table = self.table
        num_rows = 1 + table.num_forced[decoding]
        if int(num_rows.sum()) <= self.config.max_step_tokens:
            return decoding
        first = np.argsort(table.position[decoding])
        fits = np.cumsum(num_rows[first]) <= self.config.max_step_tokens
        return decoding[np.sort(first[fits])]
