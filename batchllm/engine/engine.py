"""The loop: schedule a step, run the model, sample, and answer the sequences that are done.

State is one batch's: an engine runs one plan and is then finished with. Whatever two engines share is read only (the model's weights).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from batchllm.engine.grammar import GrammarMasks
from batchllm.engine.holdings import KvTiers, SchedulerConfig
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.pool import KvShape, make_pool
from batchllm.engine.protocols import Decoder, Store, Vocabulary
from batchllm.engine.records import Records
from batchllm.engine.sampling import LogprobEntry, Sampled, Sampler
from batchllm.engine.scheduled import ScheduledStep
from batchllm.engine.scheduler import Scheduler, Speculation
from batchllm.engine.step import StepBatch, build_step
from batchllm.engine.stopping import Stopping
from batchllm.engine.transfer import HostMover, TierSetup
from batchllm.kernels.attention import CHUNK, AttentionPlan
from batchllm.planner.plan import Plan
from batchllm.prompt import Completion, SamplingParams
from batchllm.storage.cost import Rate

_TRANSFER_WAIT_S = 1.0
"""How long a step that can run nothing waits for a block from a tier before it looks again."""

_MAX_LOGIT_ROWS = 128
"""Rows whose logits exist at once: 25 MB for a vocabulary of 49,152."""


def kv_shape(decoder: Decoder) -> KvShape:
    """What `decoder` keeps of a token."""
    config = decoder.config
    return KvShape(config.num_layers, config.num_kv_heads, config.head_dim, decoder.dtype)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. `num_blocks` of `block_size` tokens in the device pool. `evict_least_recent`: see
    `SchedulerConfig`; `speculation`: see `Scheduler`.
    """

    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_sequences: int
    evict_least_recent: bool = False
    speculation: Speculation = "off"


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
    ) -> None:
        """`started_at`: `time.monotonic()` of the job's start, from which waiting times count. Owns `tiers`: see `close`."""
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
        self._kv = make_pool(
            kv_shape(decoder), num_blocks=config.num_blocks, block_size=config.block_size, device=decoder.device
        )
        self._sampler = Sampler(vocab_size=decoder.config.vocab_size, device=decoder.device, job_seed=seed)
        self._stopping = Stopping(
            eos_ids=sorted(vocabulary.eos_ids),
            token_bytes=vocabulary.token_bytes,
            control_tokens=vocabulary.special_tokens,
        )
        self._grammars = GrammarMasks(
            vocabulary=vocabulary, vocab_size=decoder.config.vocab_size, max_sequences=config.max_sequences
        )
        self._is_noted = np.zeros(config.max_sequences, dtype=bool)
        self.mover = None
        if tiers is not None:
            self.mover = HostMover(pool=self._kv, store=tiers.store, costs=tiers.costs, counters=tiers.counters)
            self._stage_end = tiers.reuse.end
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
        self._grammars.close()
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
            refused = self.records.take_refused()
            if self.scheduler.num_in_flight:
                self.scheduler.wait(_TRANSFER_WAIT_S)
            elif not refused and not step.preempted:
                raise AssertionError("nothing can run and nothing is in flight")
            return self._count(refused)
        batch = build_step(step, self.scheduler, chunk=CHUNK)
        scheduled_at = time.monotonic()
        hidden = self._forward(step, batch)
        model_at = time.monotonic()
        if batch.sample_slots.size:
            tally.completions = self._sample(hidden, batch, tally)
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
            tokens = table.tokens[slot, : table.num_tokens[slot]]
            if record.scheduled_at == 0.0:
                record.scheduled_at = now
            prompt, output = tokens[: record.prompt_tokens], tokens[record.prompt_tokens :]
            self._sampler.add(
                slot,
                record.params,
                row_index=record.row_index,
                sample_index=record.sample_index,
                prompt_ids=prompt,
                output_ids=output,
                ending_ids=self._stopping.ending_ids(record.params),
            )
            self._stopping.add(slot, record.params, output_ids=output.tolist())
            if self.scheduler.drafter is not None:
                self.scheduler.drafter.add(slot, can_draft=_samples_by_position(record.params))
            if record.params.grammar is not None:
                self._grammars.add(slot, record.params.grammar, output_ids=output.tolist())

    def _note_reuse(self, slots: np.ndarray) -> None:
        """Once an admission: what the sequence did not have to compute, known when its first token is sampled."""
        table, holdings = self.scheduler.table, self.scheduler.holdings
        for slot in slots[~self._is_noted[slots]]:
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
        self._remove_row(slot)

    def _remove_row(self, slot: int) -> None:
        self._sampler.remove(slot)
        self._stopping.remove(slot)
        self._grammars.remove(slot)

    def _forward(self, step: ScheduledStep, batch: StepBatch) -> torch.Tensor:
        decoder = self.decoder
        if step.copies:
            pairs = torch.tensor(step.copies, dtype=torch.int64, device=decoder.device)
            decoder.kernels.copy_blocks(self._kv, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
        arrays = batch.plan
        plan = AttentionPlan(
            positions=self._to_device(arrays.positions),
            block_table=self._to_device(arrays.block_table),
            items=self._to_device(arrays.items),
            merge_rows=self._to_device(arrays.merge_rows),
            merge_start=self._to_device(arrays.merge_start),
            merge_partials=self._to_device(arrays.merge_partials),
            num_partials=arrays.num_partials,
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

    def _sample(self, hidden: torch.Tensor, batch: StepBatch, tally: _Tally) -> list[Completion]:
        """Samples each of the batch's rows, appends what counts, and answers the sequences that end with it.

        A drafted row counts if the row before it gave just the token that was drafted. So the rows of a sequence are taken in turn, the
        first ones of all sequences at once: without drafts in one go.
        """
        slots, table = batch.sample_slots, self.scheduler.table
        first = np.flatnonzero(np.append(True, slots[1:] != slots[:-1]))
        end = np.append(first[1:], slots.size)
        self._note_reuse(slots[first])
        positions = batch.plan.positions[batch.sample_rows].astype(np.int64) + 1 - table.prompt_length[slots]
        sampled = self._choose(hidden, slots, positions)
        drafted = batch.token_ids[batch.sample_rows]
        now = time.monotonic()
        completions: list[Completion] = []
        done: list[int] = []
        rows, taken = first, np.arange(first.size)
        num_accepted = np.zeros(first.size, dtype=np.int64)
        while rows.size:
            ended, ending = self._take(rows, slots[rows], positions[rows], sampled, now)
            completions += ending
            done += slots[rows[ended]].tolist()
            goes_on = ~ended & (rows + 1 < end[taken])
            rows, taken = rows[goes_on], taken[goes_on]
            is_right = sampled.token_ids[rows] == drafted[rows + 1]
            rows, taken = rows[is_right] + 1, taken[is_right]
            num_accepted[taken] += 1
        with_drafts = np.flatnonzero(end - first > 1)
        if with_drafts.size and self.scheduler.drafter is not None:
            num_drafted = (end - first - 1)[with_drafts]
            self.scheduler.drop_drafts(slots[first[with_drafts]])
            self.scheduler.drafter.note(
                slots[first[with_drafts]], num_drafted=num_drafted, num_accepted=num_accepted[with_drafts]
            )
            tally.num_accepted = int(num_accepted.sum())
        for slot in done:
            self._remove_row(slot)
        self.scheduler.finish(np.array(done, dtype=np.int64))
        return completions

    def _choose(self, hidden: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> Sampled:
        """A token for each row, as if it stood alone; `positions`: tokens that its sequence has generated before it."""
        # The fused argmax would hide a NaN; the sampler names the row it is in.
        if self._sampler.all_greedy(slots, positions) and bool(hidden.isfinite().all()):
            return Sampled(self.decoder.argmax(hidden).cpu().numpy())
        token_ids = np.zeros(slots.size, dtype=np.int64)
        bad_rows: dict[int, str] = {}
        logprobs: dict[int, LogprobEntry] = {}
        for start in range(0, slots.size, _MAX_LOGIT_ROWS):
            part = slice(start, start + _MAX_LOGIT_ROWS)
            allowed = self._grammars.allowed(slots[part])
            sampled = self._sampler.sample(self.decoder.logits(hidden[part]), slots[part], positions[part], allowed)
            token_ids[part] = sampled.token_ids
            for row, reason in sampled.bad_rows.items():
                bad_rows[start + row] = self._grammars.failure(int(slots[start + row])) or reason
            logprobs |= {start + row: entry for row, entry in sampled.logprobs.items()}
        return Sampled(token_ids, bad_rows, logprobs)

    def _take(
        self, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray, sampled: Sampled, now: float
    ) -> tuple[np.ndarray, list[Completion]]:
        """Appends what was sampled for one row of each of `slots`; bool `[num_rows]`, which end with it, and their completions."""
        table, token_ids = self.scheduler.table, sampled.token_ids[rows]
        for slot in slots[positions == 0]:
            self.records[int(table.position[slot])].first_token_at = now
        for row in sampled.logprobs.keys() & set(rows.tolist()) if sampled.logprobs else ():
            logprobs = self.records[int(table.position[slots[int(np.searchsorted(rows, row))]])].logprobs
            assert logprobs is not None
            logprobs.append(sampled.logprobs[row])
        good = np.ones(slots.size, dtype=bool)
        if sampled.bad_rows:
            good = ~np.isin(rows, list(sampled.bad_rows))
        self.metrics.generated_tokens += int(good.sum())
        self.scheduler.append(slots[good], token_ids[good])
        self._sampler.append(slots[good], token_ids[good])
        ended, complete = ~good, np.zeros(slots.size, dtype=bool)
        ended[good] = self._stopping.finished_mask(slots[good], token_ids[good], positions[good] + 1)
        complete[good] = self._grammars.accept(slots[good], token_ids[good])
        ended |= complete | (table.num_tokens[slots] >= table.max_tokens[slots])
        self._grammars.prepare(slots[~ended])
        completions = [
            self._complete(
                int(slots[place]), now, error=sampled.bad_rows.get(int(rows[place])), is_whole=bool(complete[place])
            )
            for place in np.flatnonzero(ended)
        ]
        return ended, completions

    def _complete(self, slot: int, now: float, *, error: str | None, is_whole: bool) -> Completion:
        table = self.scheduler.table
        token_ids = table.tokens[slot, table.prompt_length[slot] : table.num_tokens[slot]].tolist()
        finish = None if error is not None else self._stopping.finish(slot, token_ids, is_whole=is_whole)
        return self.records.complete(
            int(table.position[slot]), now=now, token_ids=token_ids, finish=finish, error=error
        )

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
        num_drafted = step.num_drafted
        prefill_rows = batch.token_ids.size - step.num_decode - num_drafted
        seconds = finished_at - tally.started_at
        if scheduler.drafter is not None and step.num_decode and prefill_rows == 0:
            scheduler.drafter.note_step(
                num_sequences=step.num_decode,
                num_rows=step.num_decode + num_drafted,
                num_tokens=step.num_decode + tally.num_accepted,
                seconds=seconds,
            )
        if self.mover is not None and prefill_rows > step.num_decode:
            self.mover.costs.observe(Rate.PREFILL, amount=prefill_rows, seconds=tally.model_s)
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
                "num_decode_rows": step.num_decode + tally.num_accepted,
                "num_prefill_rows": prefill_rows,
                "num_running": scheduler.table.num_running,
                "num_waiting": scheduler.num_waiting,
                "num_used_blocks": scheduler.pool.num_used,
                "num_preempted": len(step.preempted),
                "num_drafted": num_drafted,
                "num_accepted": tally.num_accepted,
            }
        )


def _samples_by_position(params: SamplingParams) -> bool:
    """Whether what a position samples depends on the tokens before it through the model alone: penalties and grammars keep books."""
    has_penalty = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return not has_penalty and params.grammar is None
