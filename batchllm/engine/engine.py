"""The loop: schedule a step, run the model, sample, and answer the sequences that are done.

State is one batch's: an engine runs one plan and is then finished with. Whatever two engines share is read only (the model's weights).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import llguidance
import numpy as np
import torch

from batchllm.engine.ahead import TokensAhead
from batchllm.engine.answers import Answers
from batchllm.engine.decoder import Decoder, kv_shape
from batchllm.engine.device_copies import CudaCopies
from batchllm.engine.device_steps import DeviceSteps
from batchllm.engine.holdings import KvTiers, SchedulerConfig
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.pool import make_pool
from batchllm.engine.prefill_cost import PrefillCost
from batchllm.engine.protocols import Store, Vocabulary
from batchllm.engine.records import Records
from batchllm.engine.scheduled import ScheduledStep
from batchllm.engine.scheduler import Scheduler, Speculation
from batchllm.engine.staged_mover import StagedMover
from batchllm.engine.step import StepBatch, build_step
from batchllm.engine.step_tokens import StepTokens
from batchllm.engine.transfer import HostMover, TierSetup
from batchllm.kernels.attention import CHUNK, AttentionPlan
from batchllm.planner.plan import Plan
from batchllm.prompt import Completion, SamplingParams

_TRANSFER_WAIT_S = 1.0
"""How long a step that can run nothing waits for a block from a tier before it looks again."""

_MOST_FORCED = 31
"""Tokens behind a sampled one that a grammar may force before the model computes them: a step's rows are to be shared."""

_STAGING_SLOTS = 64
"""Blocks on their way between a GPU and the tiers."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. `num_blocks` of `block_size` tokens in the device pool.

    `evict_least_recent`: see `SchedulerConfig`. `speculation`: see `Scheduler`. `runs_ahead`: the next step is launched before the tokens of this
    one are known (see `ahead`); for a device that works beside the host. Without speculation only: a draft needs the token before it.
    """

    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_sequences: int
    evict_least_recent: bool = False
    speculation: Speculation = "off"
    runs_ahead: bool = False


@dataclass(slots=True)
class _Tally:
    """One step's counts for the step log."""

    started_at: float
    model_s: float = 0.0
    num_accepted: int = 0
    completions: list[Completion] = field(default_factory=list)


class Engine:
    """Runs one plan to its end. `step` advances it; `run` does so until all is answered or `should_stop` says so."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        vocabulary: Vocabulary,
        store: Store,
        plan: Plan,
        config: EngineConfig,
        seed: int,
        started_at: float,
        tiers: TierSetup | None = None,
        kv: torch.Tensor | None = None,
        grammar_tokens: llguidance.LLTokenizer | None = None,
    ) -> None:
        """`started_at`: `time.monotonic()` of the job's start, from which waiting times count. Owns `tiers`: see `close`. `kv`: its blocks,
        as `make_pool` makes them; None: it makes them itself. `grammar_tokens`: see `GrammarMasks`.
        """
        assert not config.runs_ahead or config.speculation == "off", "drafts need the tokens before them"
        self.decoder = decoder
        self.config = config
        self.metrics = RunMetrics(num_blocks=config.num_blocks)
        self.records = Records(
            store=store,
            plan=plan,
            max_context=decoder.config.max_context,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            started_at=started_at,
        )
        self._started_at = started_at
        if kv is None:
            kv = make_pool(
                kv_shape(decoder), num_blocks=config.num_blocks, block_size=config.block_size, device=decoder.device
            )
        self._kv = kv
        self._is_noted = np.zeros(config.max_sequences, dtype=bool)
        self.mover: HostMover | StagedMover | None = None
        self._prefill_cost: PrefillCost | None = None
        if tiers is not None:
            self._prefill_cost = PrefillCost(tiers.costs)
            self._stage_end = tiers.reuse.end
            if decoder.device.type == "cpu":
                self.mover = HostMover(pool=self._kv, store=tiers.store, costs=tiers.costs, counters=tiers.counters)
            else:
                copies = CudaCopies(self._kv, num_slots=_STAGING_SLOTS)
                self.mover = StagedMover(copies=copies, store=tiers.store, costs=tiers.costs, counters=tiers.counters)
        self.scheduler = Scheduler(
            config=SchedulerConfig(
                block_size=config.block_size,
                max_step_tokens=config.max_step_tokens,
                max_sequences=config.max_sequences,
                max_context=decoder.config.max_context,
                evict_least_recent=config.evict_least_recent,
            ),
            plan=plan,
            num_blocks=config.num_blocks,
            load=self.records.load,
            on_preempt=self._on_preempt,
            tiers=None
            if tiers is None or self.mover is None
            else KvTiers(mover=self.mover, root=tiers.root, persist=tiers.persist, reuse=tiers.reuse),
            speculation=config.speculation,
        )
        self._answers = Answers(
            decoder=decoder,
            vocabulary=vocabulary,
            table=self.scheduler.table,
            records=self.records,
            metrics=self.metrics,
            seed=seed,
            grammar_tokens=grammar_tokens,
        )
        self._tokens = StepTokens(
            scheduler=self.scheduler,
            answers=self._answers,
            metrics=self.metrics,
            most_forced=min(_MOST_FORCED, config.max_step_tokens - 1),
        )
        self._ahead = None
        if config.runs_ahead:
            self._ahead = TokensAhead(
                steps=DeviceSteps(decoder=decoder, kv=self._kv, max_sequences=config.max_sequences),
                scheduler=self.scheduler,
                answers=self._answers,
            )

    def run(
        self, *, deliver: Callable[[list[Completion]], None], should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Steps until every prompt is answered, handing finished completions to `deliver`; False when stopped before that."""
        while not self.scheduler.done:
            if should_stop():
                return False
            deliver(self.step())
        self.scheduler.check_integrity()
        return True

    def close(self, *, keep_tiers: bool = False) -> None:
        """Ends what is on its way to the tiers and closes them; ends the threads of grammars.

        `keep_tiers`: they stay open, their caller's again, for the engine of the next stage.
        """
        self._answers.close()
        if self.mover is None:
            return
        if keep_tiers:
            self.mover.detach(before=self._stage_end)
        else:
            self.mover.close()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One forward pass; the completions that it finished, and rows that were refused on the way."""
        tally = _Tally(started_at=time.monotonic())
        step = self.scheduler.schedule()
        self._note_admissions(step)
        if step.slots.size == 0:
            answered = self.records.take_refused() + ([] if self._ahead is None else self._ahead.settle())
            if self.scheduler.num_in_flight:
                self.scheduler.wait(_TRANSFER_WAIT_S)
            elif not answered and not step.preempted:
                raise AssertionError("nothing can run and nothing is in flight")
            return self._count(answered)
        batch = build_step(step, self.scheduler, chunk=CHUNK)
        scheduled_at = time.monotonic()
        self._copy_blocks(step)
        self._note_reuse(batch.sample_slots)
        if self._ahead is not None:
            launched = self._ahead.launch(step, batch)
            model_at = time.monotonic()
            tally.completions = self._ahead.take(launched)
        else:
            hidden = self._forward(batch)
            model_at = time.monotonic()
            if batch.sample_slots.size:
                taken = self._tokens.take(hidden, batch, has_drafts=step.num_drafted > 0)
                tally.completions, tally.num_accepted = taken.completions, taken.num_accepted
        finished_at = time.monotonic()
        tally.model_s = model_at - scheduled_at
        self.metrics.schedule_s += scheduled_at - tally.started_at
        self.metrics.model_s += tally.model_s
        self.metrics.sample_s += finished_at - model_at
        self._log(step, batch, tally, finished_at)
        return self._count(tally.completions + self.records.take_refused())

    def _note_admissions(self, step: ScheduledStep) -> None:
        table, now = self.scheduler.table, time.monotonic()
        for slot in step.admitted:
            record = self.records[int(table.position[slot])]
            self._is_noted[slot] = False
            if record.scheduled_at == 0.0:
                record.scheduled_at = now
            self._answers.add(slot)
            if self.scheduler.drafter is not None:
                self.scheduler.drafter.add(slot, can_draft=_samples_by_position(record.params))

    def _note_reuse(self, slots: np.ndarray) -> None:
        """Once an admission: what the sequence did not have to compute, known when its first token is sampled."""
        table, holdings = self.scheduler.table, self.scheduler.holdings
        for slot in set(slots[~self._is_noted[slots]].tolist()):
            record = self.records[int(table.position[slot])]
            cached, restored = int(holdings.cached_tokens[slot]), int(holdings.restored_tokens[slot])
            record.restored_tokens += restored
            self.metrics.restored_tokens += restored
            if record.cached_tokens is None:
                record.cached_tokens = cached
                self.metrics.prompt_tokens += record.prompt_tokens
                self.metrics.cached_prompt_tokens += cached
            else:
                self.metrics.recomputed_tokens += int(table.num_tokens[slot]) - cached
        self._is_noted[slots] = True

    def _on_preempt(self, slot: int) -> None:
        self.records[int(self.scheduler.table.position[slot])].preemptions += 1
        self.metrics.preemptions += 1
        if self._ahead is not None:
            self._ahead.drop(slot)
        self._answers.remove(slot)

    def _copy_blocks(self, step: ScheduledStep) -> None:
        if step.copies:
            pairs = torch.tensor(step.copies, dtype=torch.int64, device=self.decoder.device)
            self.decoder.kernels.copy_blocks(self._kv, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        decoder = self.decoder
        arrays = batch.plan
        plan = AttentionPlan(
            positions=self._to_device(arrays.positions),
            tables=self._to_device(arrays.tables),
            block_table=self._to_device(arrays.block_table),
            items=self._to_device(arrays.items),
            merge_rows=self._to_device(arrays.merge_rows),
            merge_start=self._to_device(arrays.merge_start),
            merge_partials=self._to_device(arrays.merge_partials),
            num_partials=arrays.num_partials,
            last_items=None if arrays.last_items is None else self._to_device(arrays.last_items),
        )
        return decoder.forward(
            token_ids=self._to_device(batch.token_ids),
            positions=plan.positions,
            slots=self._to_device(batch.kv_slots),
            plan=plan,
            kv=self._kv,
            sample_rows=self._to_device(batch.sample_rows),
        )

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.decoder.device)

    def _count(self, completions: list[Completion]) -> list[Completion]:
        for completion in completions:
            if completion.error is None:
                self.metrics.num_completed += 1
                self.metrics.completion_tokens += len(completion.token_ids)
            else:
                self.metrics.num_errors += 1
        return completions

    def _log(self, step: ScheduledStep, batch: StepBatch, tally: _Tally, finished_at: float) -> None:
        scheduler, metrics = self.scheduler, self.metrics
        num_drafted, decode_rows = step.num_drafted, step.num_decode_rows
        prefill_rows = batch.token_ids.size - decode_rows
        seconds = finished_at - tally.started_at
        reads = batch.plan.reads_of(decode_rows)
        if scheduler.drafter is not None:
            scheduler.drafter.note_step(
                # A forced row is one that counts, as if of another sequence.
                num_sequences=step.num_decode + step.num_forced,
                num_rows=decode_rows,
                num_tokens=step.num_decode + step.num_forced + tally.num_accepted,
                num_reads=reads.num_read,
                num_prefill=prefill_rows,
                seconds=seconds,
            )
        if self._prefill_cost is not None:
            if prefill_rows > step.num_decode:
                self._prefill_cost.observe(num_prefill=prefill_rows, seconds=tally.model_s)
            elif prefill_rows == 0 and num_drafted == 0:
                self._prefill_cost.plain_s.append(tally.model_s)
        metrics.num_steps += 1
        metrics.computed_prompt_tokens += prefill_rows
        metrics.drafted_tokens += num_drafted
        metrics.accepted_tokens += tally.num_accepted
        metrics.num_allocated_slots = scheduler.holdings.num_allocated * self.config.block_size
        metrics.num_unfilled_slots = scheduler.holdings.num_unfilled_slots
        metrics.peak_used_blocks = max(metrics.peak_used_blocks, scheduler.pool.num_used)
        metrics.wall_s = finished_at - self._started_at
        metrics.step_log.append(
            {
                "start_s": tally.started_at - self._started_at,
                "seconds": seconds,
                "model_seconds": tally.model_s,
                "num_decode_rows": step.num_decode + step.num_forced + tally.num_accepted,
                "num_prefill_rows": prefill_rows,
                "num_running": scheduler.table.num_running,
                "num_waiting": scheduler.num_waiting,
                "num_used_blocks": scheduler.pool.num_used,
                "num_kv_tokens_read": reads.num_read,
                "num_kv_tokens_spared": reads.num_spared,
                "num_preempted": len(step.preempted),
                "num_drafted": num_drafted,
                "num_accepted": tally.num_accepted,
            }
        )


def _samples_by_position(params: SamplingParams) -> bool:
    """Whether what a position samples depends on the tokens before it through the model alone: penalties and grammars keep books."""
    has_penalty = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return not has_penalty and params.grammar is None
