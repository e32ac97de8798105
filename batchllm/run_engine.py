"""The part of a run that computes: its stages on the engine, over one model and one set of tiers. Needs torch; `batchllm.run_job` does not."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np
import pyarrow

from batchllm.data.outputs import OutputWriter
from batchllm.data.prompts import stage_prompts
from batchllm.data.run_folder import RunRecord
from batchllm.data.token_ids import check_token_ids
from batchllm.engine.decoder import kv_shape
from batchllm.engine.engine import Engine
from batchllm.engine.grammar_tokens import grammar_tokens
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.pool import make_pool
from batchllm.engine.roofline import run_roofline
from batchllm.engine.sizing import engine_width, least_tokens, size_engine
from batchllm.engine.tier_report import TierReport
from batchllm.job import Job
from batchllm.kernels.native.memory import find_memory, release_free_memory
from batchllm.models.decoder import Decoder, dtype_for, int8_parts_for
from batchllm.models.gguf_file import forget_gguf
from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import Tokenizer
from batchllm.planner.drain import ends_by_length
from batchllm.planner.plan import Plan, make_plan
from batchllm.planner.roofline import Roofline
from batchllm.planner.store import PromptStore
from batchllm.planner.work import PlanWork, plan_work
from batchllm.prompt import Completion
from batchllm.run_load import DecoderLoad
from batchllm.run_progress import Observer, ProgressTracker, RowCounts
from batchllm.run_record import (
    EngineFacts,
    StageCounts,
    TierUse,
    device_for,
    device_versions,
    dtype_name,
    expected_tokens,
    last_rates,
    rates_record,
)
from batchllm.run_stages import Stage
from batchllm.run_tiers import RunTiers


class StageRunner:
    """Runs one stage after the other. Owns the model and the tiers, until `close`; counts what was done."""

    def __init__(
        self, job: Job, *, source: ModelSource, model: str, observer: Observer, rows: RowCounts, started_at: float
    ) -> None:
        """Starts to load the model; `model` is its fingerprint. Raises JobError for a device that is not there. `rows` is the caller's and is
        counted up.
        """
        self.metrics = RunMetrics()
        self.unique_prompt_tokens = 0
        self.load_s = 0.0
        self.kernels = "none"
        self.tiers: TierReport | None = None
        """Known once closed."""
        self._job = job
        self._model_name = source.name
        self._observer = observer
        self._rows = rows
        self._started_at = started_at
        self._device = device_for(job.engine.device)
        self._dtype = dtype_for(job.engine.dtype, self._device)
        self._work = PlanWork()
        self._max_step_tokens = 1
        self._run_tiers = RunTiers(job)
        self._tier_use: TierUse | None = None
        self._decoder: Decoder | None = None
        self._grammar_tokens: llguidance.LLTokenizer | None = None
        self._engine_facts: EngineFacts | None = None
        self._plans: list[dict[str, Any]] = []
        self._counts: list[tuple[str | None, StageCounts]] = []
        began = time.monotonic()
        self._load = DecoderLoad(
            source,
            dtype=self._dtype,
            device=self._device,
            int8_parts=int8_parts_for(job.engine.weights),
            kv_dtype=job.engine.kv.dtype,
            fingerprint=model,
        )
        self.load_s += time.monotonic() - began
        if self._load.slow_kernels:
            observer.note(f"the reference kernels run, many times slower than others: {self._load.slow_kernels}")
        # What was imported stays: without this, each look of the collector at it takes 70 ms. Last, for `close` undoes it.
        gc.freeze()

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def dtype(self) -> str:
        return dtype_name(self._dtype, weights=self._job.engine.weights)

    @property
    def versions(self) -> dict[str, Any]:
        """Of what the stages run on."""
        return device_versions(self._device)

    def record(self) -> RunRecord:
        """What the run folder keeps of the stages so far."""
        record = RunRecord(steps=self.metrics.step_log.columns)
        if self._tier_use is not None:
            record.tiers = self._tier_use.columns
        if self._engine_facts is not None:
            record.plan = {"plans": self._plans}
            record.rates = rates_record(record.steps, facts=self._engine_facts, counts=self._counts)
        return record

    def roofline(self) -> Roofline | None:
        """What the stages reached of what this machine can do; None where they took too few steps to tell."""
        if self._decoder is None:
            return None
        return run_roofline(
            self._work, decoder=self._decoder, metrics=self.metrics, max_step_tokens=self._max_step_tokens
        )

    def close(self) -> None:
        """Ends the load if it is still going on, and closes the tiers."""
        gc.unfreeze()
        self._load.close()
        self.tiers = self._run_tiers.close(self.metrics)

    def run(self, stage: Stage, *, tokenizer: Tokenizer, writer: OutputWriter, should_stop: Callable[[], bool]) -> bool:
        """Renders, plans and runs one stage, the only one of most jobs; False when it was stopped before its end."""
        try:
            return self._run(stage, tokenizer=tokenizer, writer=writer, should_stop=should_stop)
        finally:
            # A pool is freed with its engine, whose parts know each other: by the collector, not before. What follows (writing the last rows,
            # the summary, measuring the machine, the next stage's pool) needs memory of its own.
            gc.collect()

    def _run(
        self, stage: Stage, *, tokenizer: Tokenizer, writer: OutputWriter, should_stop: Callable[[], bool]
    ) -> bool:
        job, observer, rows = self._job, self._observer, self._rows
        # Those of all stages, before the first has run.
        check_token_ids(job, vocab_size=self._load.vocab_size)
        if stage.name is not None:
            observer.note(f"stage {stage.name}")
        context = self._load.max_context
        errors = stage_prompts(
            stage.job,
            input=stage.input,
            tokenizer=tokenizer,
            staging=stage.staging,
            max_context=context,
            vocab_size=self._load.vocab_size,
            should_stop=should_stop,
            history=stage.history,
        )
        for error in errors:
            writer.add_error(error.row_index, stage.named(error.message))
            rows.count_failed(error.row_index)
            rows.done += 1
        if should_stop():
            return False
        store = stage.staging.store
        if store.num_prompts == 0:
            return True
        plan = make_plan(
            store,
            prefix_sharing=job.engine.prefix_sharing,
            keep_order=job.engine.order == "input",
            max_model_tokens=context,
            engine=engine_width(
                self._device,
                max_step_tokens=job.engine.max_step_tokens,
                max_sequences=job.engine.max_sequences,
            ),
        )
        self.unique_prompt_tokens += plan.unique_prompt_tokens
        observer.note(
            f"{store.num_prompts} prompts, {plan.total_prompt_tokens} prompt tokens, "
            f"{plan.unique_prompt_tokens} to compute ({plan.reuse_ceiling:.0%} shared)"
        )
        if should_stop():
            return False
        engine = self._engine(tokenizer, stage, plan)
        counts = StageCounts(store, max_context=context)
        self._counts.append((stage.name, counts))
        self._note_plan(plan, stage, engine=engine, tokenizer=tokenizer)
        if self._tier_use is None:
            block_bytes = self._load.kv_shape.block_bytes(engine.config.block_size)
            self._tier_use = TierUse(block_bytes=block_bytes, started_at=self._started_at)
        tier_use = self._tier_use
        samples = _samples_by_row(store)
        missing = dict(samples)
        tracker = ProgressTracker(plan, rows_total=rows.total, rows_before=rows.before)

        def deliver(completions: list[Completion]) -> None:
            for completion in completions:
                row = completion.row_index
                counts.add(completion)
                if completion.error is not None:
                    completion.error = stage.named(completion.error)
                    rows.count_failed(row)
                elif not stage.is_last:
                    stage.keep(completion, tokenizer)
                    continue
                writer.add(completion, num_samples=samples.get(row, 1))
                if row in missing:
                    missing[row] -= 1
                rows.done += missing.get(row, 0) == 0
            tier_use.sample(engine)
            pool = engine.scheduler.pool
            kv_share = pool.num_used / pool.num_blocks
            observer.progress(tracker.advance(engine.metrics, kv_share=kv_share, rows_done=rows.done))

        try:
            return engine.run(deliver=deliver, should_stop=should_stop)
        finally:
            self.metrics = self.metrics.plus(engine.metrics)
            counts.forced_tokens = engine.metrics.forced_tokens
            self._plans[-1]["completion_tokens"] = engine.metrics.completion_tokens
            self._max_step_tokens = engine.config.max_step_tokens
            self._work = self._work.plus(
                plan_work(
                    plan, generated_tokens=engine.records.generated_tokens, max_sequences=engine.config.max_sequences
                )
            )
            engine.close(keep_tiers=True)

    def _engine(self, tokenizer: Tokenizer, stage: Stage, plan: Plan) -> Engine:
        """Waits for the model where it is still loading, and meanwhile finds the memory for the prompts' keys and values and works out what
        grammars need.
        """
        began = time.monotonic()
        settings = self._job.engine
        shape = self._load.kv_shape
        config = size_engine(
            plan=plan,
            shape=shape,
            device=self._device,
            max_context=self._load.max_context,
            block_size=settings.block_size,
            max_step_tokens=settings.max_step_tokens,
            max_sequences=settings.max_sequences,
            kv_bytes=settings.kv.device,
            evict_least_recent=settings.kv.policy == "lru",
            speculation=settings.speculation,
        )
        kv = make_pool(shape, num_blocks=config.num_blocks, block_size=config.block_size, device=self._device)
        on_cpu = self._device.type == "cpu"
        if on_cpu:
            find_memory(kv, num_bytes=plan.unique_prompt_tokens * shape.bytes_per_token)
        if any(params.grammar is not None for params in stage.staging.store.sampling):
            self._tokens_of_grammars(tokenizer)
        if self._decoder is None:
            self._decoder = self._load.wait()
            self.kernels = self._decoder.kernels.name
        _release_memory()
        if on_cpu:
            # Not before the weights' file is closed and what the load dropped has gone back: together they would be the most memory that the run
            # takes.
            is_certain = all(map(ends_by_length, stage.staging.store.sampling))
            num_tokens = least_tokens(plan, config, lengths_are_certain=is_certain)
            find_memory(kv, num_bytes=num_tokens * shape.bytes_per_token)
        self.load_s += time.monotonic() - began
        return Engine(
            decoder=self._decoder,
            vocabulary=tokenizer,
            store=stage.staging.store,
            plan=plan,
            config=config,
            seed=self._job.seed,
            started_at=self._started_at,
            tiers=self._run_tiers.for_stage(stage, decoder=self._decoder, plan=plan),
            kv=kv,
            grammar_tokens=self._grammar_tokens,
        )

    def _tokens_of_grammars(self, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
        if self._grammar_tokens is None:
            self._grammar_tokens = grammar_tokens(tokenizer, vocab_size=self._load.vocab_size)
        return self._grammar_tokens

    def _note_plan(self, plan: Plan, stage: Stage, *, engine: Engine, tokenizer: Tokenizer) -> None:
        """What the plan promises, for the run folder: made before the first step, so that it is no hindsight."""
        decoder = engine.decoder
        facts = EngineFacts(kv_shape(decoder), engine.config, decoder.config.max_context)
        rates = last_rates(self._job, model=self._model_name, device=self.device, dtype=self.dtype)
        explanation = facts.explain(
            plan,
            stage.staging.store,
            decode_text=tokenizer.decode,
            expected=expected_tokens(
                stage.job,
                rates,
                stage=stage.name,
                tokenizer=tokenizer,
                grammar_tokens=lambda: self._tokens_of_grammars(tokenizer),
            ),
        )
        self._engine_facts = facts
        record = facts.plan_record(explanation, stage=stage.name, first_step=self.metrics.num_steps)
        self._plans.append(record)


def _release_memory() -> None:
    """Gives back what input, tokenizer, load and plan made and dropped: it does not fit what steps need, and stays up to the peak else."""
    forget_gguf()
    pyarrow.default_memory_pool().release_unused()
    release_free_memory()


def _samples_by_row(store: PromptStore) -> dict[int, int]:
    """Rows with more than one sample, and how many they have."""
    counts = np.array([params.n for params in store.sampling], dtype=np.int64)[store.sampling_id]
    several = counts > 1
    return dict(zip(store.row_index[several].tolist(), counts[several].tolist(), strict=True))
