"""The loop: schedule a step, run the model, sample, and answer the sequences that are done.

State is one batch's: an engine runs one plan and is then finished with. Whatever two engines share is read only (the model's weights).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from batchllm.engine.ahead import TokensAhead
from batchllm.engine.blocks import num_blocks_for
from batchllm.engine.decoder import Decoder, kv_shape
from batchllm.engine.device_steps import DeviceSteps
from batchllm.engine.grammar import GrammarMasks
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.pool import make_pool
from batchllm.engine.sampling import LogprobEntry, Sampler
from batchllm.engine.scheduler import KvTiers, ScheduledStep, Scheduler, SchedulerConfig, WaitingSequence
from batchllm.engine.step import StepBatch, build_step
from batchllm.engine.stopping import Stopping
from batchllm.engine.transfer import HostMover, TierSetup
from batchllm.kernels.attention import CHUNK, AttentionPlan
from batchllm.plan.plan import Plan
from batchllm.prompt import Completion, SamplingParams
from batchllm.storage.cost import Rate

_TRANSFER_WAIT_S = 1.0
"""How long a step that can run nothing waits for a block from a tier before it looks again."""

_MAX_LOGIT_ROWS = 128
"""Rows whose logits exist at once: 25 MB for a vocabulary of 49,152."""


class Vocabulary(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def token_bytes(self) -> Sequence[bytes]: ...
    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]: ...


class Store(Protocol):
    """The staged prompts, as the engine reads them."""

    @property
    def row_index(self) -> np.ndarray: ...
    @property
    def sample_index(self) -> np.ndarray: ...
    @property
    def sampling_id(self) -> np.ndarray: ...
    @property
    def sampling(self) -> list[SamplingParams]: ...

    def tokens(self, prompt: int) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. `num_blocks` of `block_size` tokens in the device pool. `evict_least_recent`: see `SchedulerConfig`.

    `runs_ahead`: the next step is launched before the tokens of this one are known (see `ahead`); for a device that works beside the host.
    """

    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_sequences: int
    evict_least_recent: bool = False
    runs_ahead: bool = False


@dataclass(slots=True)
class _Record:
    """What one sequence's completion will say; kept from its first admission to its end, over preemptions."""

    params: SamplingParams
    row_index: int
    sample_index: int
    prompt_tokens: int
    cached_tokens: int | None = None
    restored_tokens: int = 0
    preemptions: int = 0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    logprobs: list[LogprobEntry] | None = None


@dataclass(slots=True)
class _Tally:
    """One step's counts for the step log."""

    started_at: float
    model_s: float = 0.0
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
        self._store = store
        self._plan = plan
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
        self._records: dict[int, _Record] = {}
        self._is_noted = np.zeros(config.max_sequences, dtype=bool)
        self.mover = None
        if tiers is not None:
            self.mover = HostMover(pool=self._kv, store=tiers.store, costs=tiers.costs)
        self._refused: list[Completion] = []
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
            load=self._load,
            on_preempt=self._on_preempt,
            tiers=None
            if tiers is None or self.mover is None
            else KvTiers(mover=self.mover, root=tiers.root, persist=tiers.persist),
        )
        self._ahead = None
        if config.runs_ahead:
            self._ahead = TokensAhead(
                steps=DeviceSteps(decoder=decoder, kv=self._kv, max_sequences=config.max_sequences),
                scheduler=self.scheduler,
                sampler=self._sampler,
                choose=self._choose,
                answer=self._answer,
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

    def close(self) -> None:
        """Ends what is on its way to the tiers and closes them; ends the threads of grammars."""
        self._grammars.close()
        if self.mover is not None:
            self.mover.close()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One forward pass; the completions that it finished, and rows that were refused on the way."""
        tally = _Tally(started_at=time.monotonic())
        step = self.scheduler.schedule()
        self._note_admissions(step)
        if step.slots.size == 0:
            refused, self._refused = self._refused, []
            answered = refused + ([] if self._ahead is None else self._ahead.settle())
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
                tally.completions = self._sample(hidden, batch.sample_slots)
        finished_at = time.monotonic()
        tally.model_s = model_at - scheduled_at
        self.metrics.schedule_s += scheduled_at - tally.started_at
        self.metrics.model_s += tally.model_s
        self.metrics.sample_s += finished_at - model_at
        self._log(step, batch, tally, finished_at)
        refused, self._refused = self._refused, []
        return self._count(tally.completions + refused)

    def _load(self, position: int) -> WaitingSequence | None:
        """The sequence at a plan position, or an error row if it can never run."""
        prompt = int(self._plan.order[position])
        params = self._store.sampling[int(self._store.sampling_id[prompt])]
        tokens = self._store.tokens(prompt)
        context = self.decoder.config.max_context
        max_tokens = min(tokens.size + params.max_tokens, context)
        # The last token generated is never read, so its KV needs no slot.
        needed = num_blocks_for(max_tokens - 1, self.config.block_size)
        error = None
        if tokens.size >= context:
            error = f"prompt has {tokens.size} tokens; the model's context of {context} leaves none to generate"
        elif needed > self.config.num_blocks:
            slots = self.config.num_blocks * self.config.block_size
            error = (
                f"prompt of {tokens.size} and up to {max_tokens - tokens.size} new tokens need {needed} KV blocks; "
                f"the pool has {self.config.num_blocks} ({slots} tokens): raise engine.kv.device or lower max_tokens"
            )
        record = _Record(
            params=params,
            row_index=int(self._store.row_index[prompt]),
            sample_index=int(self._store.sample_index[prompt]),
            prompt_tokens=tokens.size,
            logprobs=None if params.logprobs is None else [],
        )
        if error is not None:
            self._refused.append(
                Completion(record.row_index, record.sample_index, error=error, prompt_tokens=tokens.size)
            )
            return None
        self._records[position] = record
        return WaitingSequence(position=position, tokens=tokens, prompt_length=tokens.size, max_tokens=max_tokens)

    def _note_admissions(self, step: ScheduledStep) -> None:
        table, now = self.scheduler.table, time.monotonic()
        for slot in step.admitted:
            record = self._records[int(table.position[slot])]
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
            if record.params.grammar is not None:
                self._grammars.add(slot, record.params.grammar, output_ids=output.tolist())

    def _note_reuse(self, slots: np.ndarray) -> None:
        """Once an admission: what the sequence did not have to compute, known when its first token is sampled."""
        table, scheduler = self.scheduler.table, self.scheduler
        for slot in slots[~self._is_noted[slots]]:
            record = self._records[int(table.position[slot])]
            cached, restored = int(scheduler.cached_tokens[slot]), int(scheduler.restored_tokens[slot])
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
        self._records[int(self.scheduler.table.position[slot])].preemptions += 1
        self.metrics.preemptions += 1
        if self._ahead is not None:
            self._ahead.drop(slot)
        self._remove_row(slot)

    def _remove_row(self, slot: int) -> None:
        self._sampler.remove(slot)
        self._stopping.remove(slot)
        self._grammars.remove(slot)

    def _copy_blocks(self, step: ScheduledStep) -> None:
        if step.copies:
            pairs = torch.tensor(step.copies, dtype=torch.int64, device=self.decoder.device)
            self.decoder.kernels.copy_blocks(self._kv, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        decoder = self.decoder
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

    def _sample(self, hidden: torch.Tensor, slots: np.ndarray) -> list[Completion]:
        """Samples a token for each of `slots`, appends it, and answers the sequences that end with it."""
        table = self.scheduler.table
        positions = (table.num_tokens[slots] - table.prompt_length[slots]).astype(np.int64)
        token_ids, bad_rows = self._choose(hidden, slots, positions)
        good = token_ids >= 0
        self.scheduler.append(slots[good], token_ids[good])
        return self._answer(slots, positions, token_ids, bad_rows)

    def _choose(
        self, hidden: torch.Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, dict[int, str]]:
        """A token for each of `slots`, whose next is their `positions`-th; -1 for rows that cannot be sampled, with why."""
        table = self.scheduler.table
        token_ids = np.zeros(slots.size, dtype=np.int64)
        bad_rows: dict[int, str] = {}
        # The fused argmax would hide a NaN; the sampler names the row it is in.
        if self._sampler.all_greedy(slots, positions) and bool(hidden.isfinite().all()):
            token_ids[:] = self.decoder.argmax(hidden).cpu().numpy()
        else:
            for start in range(0, slots.size, _MAX_LOGIT_ROWS):
                part = slice(start, start + _MAX_LOGIT_ROWS)
                allowed = self._grammars.allowed(slots[part])
                sampled = self._sampler.sample(self.decoder.logits(hidden[part]), slots[part], positions[part], allowed)
                token_ids[part] = sampled.token_ids
                for row, reason in sampled.bad_rows.items():
                    bad_rows[start + row] = self._grammars.failure(int(slots[start + row])) or reason
                for row, entry in sampled.logprobs.items():
                    logprobs = self._records[int(table.position[slots[start + row]])].logprobs
                    assert logprobs is not None
                    logprobs.append(entry)
        return token_ids, bad_rows

    def _answer(
        self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, bad_rows: Mapping[int, str]
    ) -> list[Completion]:
        """Takes note of tokens that the table has already, and answers the sequences that end with theirs; -1: the row is bad."""
        table = self.scheduler.table
        now = time.monotonic()
        for slot in slots[positions == 0]:
            self._records[int(table.position[slot])].first_token_at = now
        good = token_ids >= 0
        self.metrics.generated_tokens += int(good.sum())
        self._sampler.append(slots[good], token_ids[good])
        ended, complete = ~good, np.zeros(slots.size, dtype=bool)
        ended[good] = self._stopping.finished_mask(slots[good], token_ids[good], positions[good] + 1)
        complete[good] = self._grammars.accept(slots[good], token_ids[good])
        num_tokens = table.prompt_length[slots] + positions + good
        ended |= complete | (num_tokens >= table.max_tokens[slots])
        self._grammars.prepare(slots[~ended])
        done = slots[ended]
        # A token that the host ran ahead by is no token of a sequence that has ended before it.
        table.num_tokens[done] = num_tokens[ended]
        completions = [
            self._complete(int(slots[row]), now, error=bad_rows.get(int(row)), is_whole=bool(complete[row]))
            for row in np.flatnonzero(ended)
        ]
        for slot in done:
            self._remove_row(int(slot))
        self.scheduler.finish(done)
        return completions

    def _complete(self, slot: int, now: float, *, error: str | None, is_whole: bool) -> Completion:
        table = self.scheduler.table
        record = self._records.pop(int(table.position[slot]))
        completion = Completion(
            row_index=record.row_index,
            sample_index=record.sample_index,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens or 0,
            restored_tokens=record.restored_tokens,
            preemptions=record.preemptions,
            queue_s=record.scheduled_at - self._started_at,
            e2e_s=now - self._started_at,
            error=error,
        )
        if error is not None:
            return completion
        token_ids = table.tokens[slot, record.prompt_tokens : table.num_tokens[slot]].tolist()
        finish = self._stopping.finish(slot, token_ids, is_whole=is_whole)
        completion.text = finish.text
        completion.finish_reason = finish.finish_reason
        completion.stop_reason = finish.stop_reason
        completion.token_ids = token_ids
        completion.logprobs = record.logprobs
        completion.ttft_s = record.first_token_at - record.scheduled_at
        if len(token_ids) > 1:
            completion.tpot_s = (now - record.first_token_at) / (len(token_ids) - 1)
        return completion

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
        prefill_rows = batch.token_ids.size - step.num_decode
        if self.mover is not None and prefill_rows > step.num_decode:
            self.mover.costs.observe(Rate.PREFILL, amount=prefill_rows, seconds=tally.model_s)
        metrics.num_steps += 1
        metrics.computed_prompt_tokens += prefill_rows
        metrics.num_allocated_slots = scheduler.num_allocated * self.config.block_size
        metrics.num_unfilled_slots = scheduler.num_unfilled_slots
        metrics.peak_used_blocks = max(metrics.peak_used_blocks, scheduler.pool.num_used)
        metrics.wall_s = finished_at - self._started_at
        metrics.step_log.append(
            {
                "start_s": tally.started_at - self._started_at,
                "seconds": finished_at - tally.started_at,
                "model_seconds": tally.model_s,
                "num_decode_rows": step.num_decode,
                "num_prefill_rows": prefill_rows,
                "num_running": scheduler.table.num_running,
                "num_waiting": scheduler.num_waiting,
                "num_used_blocks": scheduler.pool.num_used,
                "num_preempted": len(step.preempted),
            }
        )
