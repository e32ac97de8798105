"""One execution of a job: from the job file to written completions and a summary. Resumable at any moment."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchllm import __version__
from batchllm.data.error_count import ErrorCount, num_failed
from batchllm.data.inputs import Input, open_input
from batchllm.data.openai_output import write_batch_files
from batchllm.data.outputs import OutputFolder, OutputWriter, make_fingerprint
from batchllm.data.prompts import Staging, stage_prompts
from batchllm.data.results import query
from batchllm.data.run_folder import RunFolder, RunRecord
from batchllm.data.schema import completion_schema
from batchllm.engine.engine import Engine, kv_shape
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.roofline import run_roofline
from batchllm.engine.sizing import most_blocks, size_engine
from batchllm.engine.tier_report import TierReport, report_tiers
from batchllm.engine.tier_setup import DiskRequest, TierRequest, open_tiers
from batchllm.engine.transfer import TierSetup
from batchllm.errors import JobError, OutputError
from batchllm.job import Job
from batchllm.models.decoder import Decoder, dtype_for, int8_parts_for
from batchllm.models.fingerprint import model_fingerprint
from batchllm.models.registry import resolve_model
from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import Tokenizer, load_tokenizer
from batchllm.plan.plan import Plan, make_plan
from batchllm.plan.store import PromptStore
from batchllm.plan.work import PlanWork, plan_work
from batchllm.prompt import Completion
from batchllm.run_load import DecoderLoad
from batchllm.run_progress import Observer, ProgressTracker
from batchllm.run_record import (
    EngineFacts,
    GeneratedShare,
    TierUse,
    device_for,
    dtype_name,
    job_as_yaml_values,
    last_rates,
    rates_record,
    versions,
)
from batchllm.run_stages import RunStages, Stage
from batchllm.run_summary import RunSummary, summary_values
from batchllm.storage.keys import KeyScope


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How much of a job a run takes, and when it gives up; none of it changes what a row says.

    `limit`: the first rows only. `retry_errors`: rows that carry an error run again. `max_error_rate`, from 0 to 1: the run
    gives up once it is certain that more of all rows carry an error, those of earlier runs among them.
    """

    limit: int | None = None
    retry_errors: bool = False
    max_error_rate: float | None = None


def run_job(job: Job, *, options: RunOptions | None = None, observer: Observer | None = None) -> RunSummary:
    """Runs what is left of `job` and returns what happened.

    Raises JobError, InputError, ModelError or OutputError where the job cannot run, RunLockedError where another run is at it.
    """
    observer = observer or Observer()
    started_at = time.monotonic()
    with OutputFolder(job.output.path) as output:
        run = _Run(job, options=options or RunOptions(), observer=observer, output=output, started_at=started_at)
        return run.execute_recorded()


class _Run:
    """The stages of one run, in order; owns nothing that outlives `execute`."""

    def __init__(
        self, job: Job, *, options: RunOptions, observer: Observer, output: OutputFolder, started_at: float
    ) -> None:
        self._job = job
        self._options = options
        self._observer = observer
        self._output = output
        self._started_at = started_at
        self._device = device_for(job.engine.device)
        self._dtype = dtype_for(job.engine.dtype, self._device)
        self._dtype_name = dtype_name(self._dtype, weights=job.engine.weights)
        self._kernels = "none"
        self._metrics = RunMetrics()
        self._work = PlanWork()
        self._max_step_tokens = 1
        self._tiers: TierReport | None = None
        self._unique_prompt_tokens = 0
        self._load_s = 0.0
        self._rows_before = 0
        self._rows_done = 0
        self._rows_total = 0
        self._decoder: Decoder | None = None
        self._errors: ErrorCount | None = None
        self._record = RunRecord()
        self._engine_facts: EngineFacts | None = None
        self._generated_share: GeneratedShare | None = None

    def execute_recorded(self) -> RunSummary:
        """`execute`, and the run folder that says how it went, whichever way it ends."""
        folder = RunFolder(
            self._output.path,
            run_id=self._output.run_id,
            job=job_as_yaml_values(self._job),
            versions=versions(self._device),
            name=self._job.name,
        )
        try:
            summary = self.execute()
        except BaseException as error:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            counts = {"wall_s": time.monotonic() - self._started_at, "num_steps": self._metrics.num_steps}
            counts |= {"rows_before": self._rows_before, "exit_code": getattr(error, "exit_code", 1)}
            self._close(folder, status=status, summary=counts, error=str(error) or type(error).__name__)
            raise
        status = "finished" if summary.finished else "stopped"
        if summary.too_many_errors is not None:
            status = "failed"
        self._close(folder, status=status, summary=summary_values(summary), error=summary.too_many_errors)
        return summary

    def _close(self, folder: RunFolder, *, status: str, summary: dict[str, Any], error: str | None = None) -> None:
        """Completions are what a run is for: a record that cannot be written is said, and changes nothing else."""
        self._record.steps = self._metrics.step_log.columns
        if self._engine_facts is not None and self._generated_share is not None:
            self._record.rates = rates_record(self._record.steps, facts=self._engine_facts, share=self._generated_share)
        try:
            folder.close(status=status, summary=summary, record=self._record, error=error)
        except OutputError as failure:
            self._observer.note(str(failure))

    def execute(self) -> RunSummary:
        job, observer = self._job, self._observer
        source_rows = open_input(job, spool_folder=self._output.staging, limit=self._options.limit)
        source = resolve_model(job.model, base_folder=job.folder, say=observer.note)
        model = model_fingerprint(source)
        fingerprint = make_fingerprint(
            job=job.fingerprint_parts(),
            input=source_rows.fingerprint,
            model=model,
            version=__version__,
        )
        done = self._output.resume(fingerprint=fingerprint, num_rows=source_rows.table.num_rows)
        if self._options.retry_errors:
            num_retried = self._output.drop_error_rows(below=source_rows.num_rows)
            if num_retried:
                observer.note(f"{num_retried} rows that carry an error run again")
                done = self._output.resume(fingerprint=fingerprint, num_rows=source_rows.table.num_rows)
        done = done[: source_rows.num_rows]
        self._rows_total = source_rows.num_rows
        if self._options.max_error_rate is not None:
            self._errors = ErrorCount(
                rate=self._options.max_error_rate,
                num_rows=source_rows.num_rows,
                num_failed=num_failed(self._output.path, below=source_rows.num_rows),
            )
        self._rows_before = self._rows_done = int(done.sum())
        if self._rows_before:
            observer.note(f"{self._rows_before} of {source_rows.num_rows} rows are done already")
        finished = bool(done.all())
        if not finished and not self._gives_up():
            load = DecoderLoad(
                source,
                dtype=self._dtype,
                device=self._device,
                int8_parts=int8_parts_for(job.engine.weights),
                fingerprint=model,
            )
            try:
                finished = self._run_stages(source_rows, source, load, done)
            finally:
                load.close()
        if source_rows.holds_requests:
            write_batch_files(self._output.path, staging=self._output.staging, tokens=lambda: load_tokenizer(source))
        return self._summary(source_rows, source.name, finished)

    def _run_stages(self, source_rows: Input, source: ModelSource, load: DecoderLoad, done: np.ndarray) -> bool:
        """Runs every stage; False when one was stopped before its end."""
        tokenizer = load_tokenizer(source)
        staging = Staging.create(self._output.staging, input=source_rows, done=done)
        stages = RunStages(self._job, input=source_rows, staging=staging, folder=self._output.staging)
        schema = completion_schema(
            [*source_rows.carried, *stages.completion_fields],
            with_token_ids=self._job.output.token_ids,
            with_logprobs=stages.jobs[-1].sampling.logprobs is not None or source_rows.holds_requests,
        )
        writer = OutputWriter(self._output, schema=schema, kept=stages.cells, model=source.name)
        try:
            return all(
                self._run_stage(stages.open(number, tokenizer), load, tokenizer, writer)
                for number in range(len(stages.jobs))
            )
        finally:
            # What is complete is written even when the run fails: nothing that was computed is lost.
            try:
                writer.close()
            finally:
                stages.close()

    def _run_stage(self, stage: Stage, load: DecoderLoad, tokenizer: Tokenizer, writer: OutputWriter) -> bool:
        """Renders, plans and runs one stage, the only one of most jobs; False when it was stopped before its end."""
        job, observer = self._job, self._observer
        if stage.name is not None:
            observer.note(f"stage {stage.name}")
        context = load.max_context
        should_stop = self._should_stop
        errors = stage_prompts(
            stage.job,
            input=stage.input,
            tokenizer=tokenizer,
            staging=stage.staging,
            max_context=context,
            should_stop=should_stop,
            history=stage.history,
        )
        for error in errors:
            writer.add_error(error.row_index, stage.named(error.message))
            self._count_failed(error.row_index)
            self._rows_done += 1
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
        )
        self._unique_prompt_tokens += plan.unique_prompt_tokens
        observer.note(
            f"{store.num_prompts} prompts, {plan.total_prompt_tokens} prompt tokens, "
            f"{plan.unique_prompt_tokens} to compute ({plan.reuse_ceiling:.0%} shared)"
        )
        if should_stop():
            return False
        if self._decoder is None:
            try:
                self._decoder = load.wait()
            finally:
                self._load_s = load.waited_s
            self._kernels = self._decoder.kernels.name
        engine = self._engine(self._decoder, tokenizer, store, plan)
        share = GeneratedShare(store, max_context=context)
        if stage.name is None:
            # Promises and rates are those of one plan; a job with stages has several.
            self._note_plan(plan, store, engine=engine, model=load.source.name, tokenizer=tokenizer)
            self._generated_share = share
        tier_use = TierUse(
            block_bytes=kv_shape(self._decoder).block_bytes(engine.config.block_size), started_at=self._started_at
        )
        self._record.tiers = tier_use.columns
        samples = _samples_by_row(store)
        missing = dict(samples)
        tracker = ProgressTracker(plan, rows_total=self._rows_total, rows_before=self._rows_before)

        def deliver(completions: list[Completion]) -> None:
            for completion in completions:
                row = completion.row_index
                share.add(completion)
                if completion.error is not None:
                    completion.error = stage.named(completion.error)
                    self._count_failed(row)
                elif not stage.is_last:
                    stage.keep(completion, tokenizer)
                    continue
                writer.add(completion, num_samples=samples.get(row, 1))
                if row in missing:
                    missing[row] -= 1
                self._rows_done += missing.get(row, 0) == 0
            tier_use.sample(engine)
            observer.progress(tracker.advance(engine, rows_done=self._rows_done))

        try:
            return engine.run(deliver=deliver, should_stop=should_stop)
        finally:
            self._metrics = self._metrics.plus(engine.metrics)
            self._max_step_tokens = engine.config.max_step_tokens
            self._work = self._work.plus(
                plan_work(
                    plan, generated_tokens=engine.records.generated_tokens, max_sequences=engine.config.max_sequences
                )
            )
            engine.close()
            if engine.mover is not None:
                self._tiers = report_tiers(engine.mover, engine.metrics)

    def _should_stop(self) -> bool:
        return self._gives_up() or self._observer.should_stop()

    def _gives_up(self) -> bool:
        return self._errors is not None and self._errors.is_too_high

    def _count_failed(self, row_index: int) -> None:
        if self._errors is not None:
            self._errors.add(row_index)

    def _engine(self, decoder: Decoder, tokenizer: Tokenizer, store: PromptStore, plan: Plan) -> Engine:
        settings = self._job.engine
        config = size_engine(
            plan=plan,
            shape=kv_shape(decoder),
            device=self._device,
            max_context=decoder.config.max_context,
            block_size=settings.block_size,
            max_step_tokens=settings.max_step_tokens,
            max_sequences=settings.max_sequences,
            kv_bytes=settings.kv.device,
            evict_least_recent=settings.kv.policy == "lru",
            speculation=settings.speculation,
        )
        return Engine(
            decoder=decoder,
            vocabulary=tokenizer,
            store=store,
            plan=plan,
            config=config,
            seed=self._job.seed,
            started_at=self._started_at,
            tiers=self._open_tiers(decoder, plan),
        )

    def _open_tiers(self, decoder: Decoder, plan: Plan) -> TierSetup | None:
        settings, shape = self._job.engine, kv_shape(decoder)
        kv, block_size = settings.kv, settings.block_size
        if self._device.type != "cpu" and (kv.host or kv.disk):
            raise JobError(f"engine.kv: tiers are not supported on {self._device.type} yet; leave host and disk out")
        disk = None
        if kv.disk is not None:
            disk = DiskRequest(Path(kv.disk.path), kv.disk.size, max_age_s=kv.disk.max_age_days * 86400)
        request = TierRequest(host_bytes=kv.host, disk=disk, policy=kv.policy, persist=kv.persist)
        layout = f"block-major {shape.num_layers}x2x{shape.num_kv_heads}x{block_size}x{shape.head_dim}"
        # The bits of keys and values depend on the kernels too.
        scope = KeyScope(
            model=decoder.fingerprint.encode(), layout=f"{layout} {decoder.kernels.name}", dtype=str(decoder.dtype)
        )
        return open_tiers(
            request,
            scope=scope,
            block_bytes=shape.block_bytes(block_size),
            block_size=block_size,
            most_blocks=most_blocks(plan, max_context=decoder.config.max_context, block_size=block_size),
        )

    def _note_plan(self, plan: Plan, store: PromptStore, *, engine: Engine, model: str, tokenizer: Tokenizer) -> None:
        """What the plan promises, for the run folder: made before the first step, so that it is no hindsight."""
        decoder = engine.decoder
        facts = EngineFacts(kv_shape(decoder), engine.config, decoder.config.max_context)
        rates = last_rates(self._job, model=model, device=str(self._device), dtype=self._dtype_name)
        explanation = facts.explain(
            plan,
            store,
            decode_text=tokenizer.decode,
            expected_share=rates.generated_share if rates is not None else 1.0,
        )
        self._engine_facts = facts
        self._record.plan = facts.plan_record(explanation)

    def _summary(self, rows: Input, model: str, finished: bool) -> RunSummary:
        metrics = self._metrics
        counts = query(
            "select count(*) filter (not failed) as completed, count(*) filter (failed) as failed "
            "from (select bool_or(error is not null) as failed from completions "
            f"where row_index < {rows.num_rows} group by row_index)",
            self._output.path,
        ).to_pylist()[0]
        engine_s = metrics.schedule_s + metrics.model_s + metrics.sample_s
        return RunSummary(
            name=self._job.name,
            run_id=self._output.run_id,
            output=self._output.path,
            finished=finished,
            num_rows=rows.num_rows,
            rows_before=self._rows_before,
            rows_completed=counts["completed"],
            rows_failed=counts["failed"],
            wall_s=time.monotonic() - self._started_at,
            load_s=self._load_s,
            prompt_tokens=metrics.prompt_tokens,
            unique_prompt_tokens=self._unique_prompt_tokens,
            computed_prompt_tokens=metrics.computed_prompt_tokens,
            cached_prompt_tokens=metrics.cached_prompt_tokens,
            completion_tokens=metrics.completion_tokens,
            output_tokens_per_s=metrics.completion_tokens / engine_s if engine_s else 0.0,
            num_steps=metrics.num_steps,
            preemptions=metrics.preemptions,
            recomputed_tokens=metrics.recomputed_tokens,
            kv_peak_share=metrics.peak_used_blocks / metrics.num_blocks if metrics.num_blocks else 0.0,
            kv_waste_share=metrics.num_unfilled_slots / metrics.num_allocated_slots
            if metrics.num_allocated_slots
            else 0.0,
            device=str(self._device),
            dtype=self._dtype_name,
            kernels=self._kernels,
            model=model,
            too_many_errors=self._errors.reason if self._errors is not None else None,
            tiers=self._tiers,
            drafted_tokens=metrics.drafted_tokens,
            accepted_tokens=metrics.accepted_tokens,
            roofline=run_roofline(
                self._work, decoder=self._decoder, metrics=metrics, max_step_tokens=self._max_step_tokens
            )
            if finished and self._decoder is not None
            else None,
        )


def _samples_by_row(store: PromptStore) -> dict[int, int]:
    """Rows with more than one sample, and how many they have."""
    counts = np.array([params.n for params in store.sampling], dtype=np.int64)[store.sampling_id]
    several = counts > 1
    return dict(zip(store.row_index[several].tolist(), counts[several].tolist(), strict=True))
