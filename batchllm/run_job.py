"""One execution of a job: from the job file to written completions and a summary. Resumable at any moment."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from batchllm import __version__
from batchllm.data.error_count import AnsweredRows, ErrorCount, answered_rows
from batchllm.data.inputs import Input, open_input
from batchllm.data.openai_output import write_batch_files
from batchllm.data.outputs import OutputFolder, OutputWriter, make_fingerprint
from batchllm.data.prompts import Staging
from batchllm.data.run_folder import RunFolder, RunRecord
from batchllm.data.schema import completion_schema
from batchllm.engine.metrics import RunMetrics
from batchllm.errors import FolderError, JobError, OutputError
from batchllm.job import Job
from batchllm.models.fingerprint import model_fingerprint
from batchllm.models.registry import resolve_model
from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import load_tokenizer
from batchllm.run_progress import Observer, RowCounts
from batchllm.run_stages import RunStages
from batchllm.run_summary import RunSummary, summary_values
from batchllm.run_versions import job_as_yaml_values, versions

if TYPE_CHECKING:  # imported when there is something to compute
    from batchllm.run_engine import StageRunner


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How much of a job a run takes, and when it gives up; none of it changes what a row says.

    `limit`: the first rows only. `retry_errors`: rows that carry an error run again. `max_error_rate`, from 0 to 1: the run
    gives up once it is certain that more of all rows carry an error, those of earlier runs among them. `error_if_done`: why it is an error
    if earlier runs have answered every row; None where it is none.
    """

    limit: int | None = None
    retry_errors: bool = False
    max_error_rate: float | None = None
    error_if_done: str | None = None


def run_job(job: Job, *, options: RunOptions | None = None, observer: Observer | None = None) -> RunSummary:
    """Runs what is left of `job` and returns what happened.

    Raises a WrongInputError (JobError, InputError, ModelError, FolderError) where the job cannot run, RunLockedError where another run is at it,
    OutputError where the disk is full.
    """
    observer = observer or Observer()
    started_at = time.monotonic()
    with OutputFolder(job.output.path) as output:
        run = _Run(job, options=options or RunOptions(), observer=observer, output=output, started_at=started_at)
        return run.execute_recorded()


class _Run:
    """One execution of a job. What needs no model is done here; torch is imported when there is something to compute."""

    def __init__(
        self, job: Job, *, options: RunOptions, observer: Observer, output: OutputFolder, started_at: float
    ) -> None:
        self._job = job
        self._options = options
        self._observer = observer
        self._output = output
        self._started_at = started_at
        self._rows = RowCounts()
        self._answered = AnsweredRows()  # by earlier runs
        self._writer: OutputWriter | None = None
        self._runner: StageRunner | None = None
        self._model_files_s = 0.0  # finding and hashing the model's files, loading its tokenizer

    def execute_recorded(self) -> RunSummary:
        """`_execute`, and the run folder that says how it went, whichever way it ends."""
        folder = RunFolder(
            self._output.path,
            run_id=self._output.run_id,
            job=job_as_yaml_values(self._job),
            versions=versions(),
            name=self._job.name,
        )
        try:
            summary = self._execute(folder)
        except BaseException as error:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            num_steps = 0 if self._runner is None else self._runner.metrics.num_steps
            counts = {"wall_s": time.monotonic() - self._started_at, "num_steps": num_steps}
            counts |= {"rows_before": self._rows.before, "exit_code": getattr(error, "exit_code", 1)}
            self._close(folder, status=status, summary=counts, error=str(error) or type(error).__name__)
            raise
        status = "finished" if summary.finished else "stopped"
        if summary.failure is not None:
            status = "failed"
        self._close(folder, status=status, summary=summary_values(summary), error=summary.failure)
        return summary

    def _close(self, folder: RunFolder, *, status: str, summary: dict[str, Any], error: str | None = None) -> None:
        """Completions are what a run is for: a record that cannot be written is said, and changes nothing else."""
        record = RunRecord() if self._runner is None else self._runner.record()
        try:
            folder.close(status=status, summary=summary, record=record, error=error)
        except (FolderError, OutputError) as failure:
            self._observer.note(str(failure))

    def _execute(self, folder: RunFolder) -> RunSummary:
        job, observer = self._job, self._observer
        source_rows = open_input(job, spool_folder=self._output.staging, limit=self._options.limit)
        began = time.monotonic()
        source = resolve_model(job.model, base_folder=job.folder, say=observer.note)
        model = model_fingerprint(source)
        self._model_files_s += time.monotonic() - began
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
        rows = self._rows
        rows.total = source_rows.num_rows
        rows.before = rows.done = int(done.sum())
        if rows.before:
            self._answered = answered_rows(self._output.path, below=source_rows.num_rows)
        if self._options.max_error_rate is not None:
            rows.errors = ErrorCount(
                rate=self._options.max_error_rate,
                num_rows=source_rows.num_rows,
                num_failed=self._answered.failed,
            )
        if rows.before:
            observer.note(f"{rows.before} of {source_rows.num_rows} rows are done already")
        finished = bool(done.all())
        if finished and self._options.error_if_done is not None:
            raise JobError(self._options.error_if_done)
        if not finished and not rows.gives_up:
            finished = self._run_stages(folder, source_rows=source_rows, source=source, model=model, done=done)
        if source_rows.holds_requests:
            write_batch_files(self._output.path, staging=self._output.staging, tokens=lambda: load_tokenizer(source))
        return self._summary(source_rows, source.name, finished)

    def _run_stages(
        self, folder: RunFolder, *, source_rows: Input, source: ModelSource, model: str, done: np.ndarray
    ) -> bool:
        """Computes the rows that are not done; False when it was stopped before the end. `model`: the fingerprint of `source`."""
        # Not before there is something to compute: the import takes longer than all that a complete run does.
        from batchllm.run_engine import StageRunner

        runner = self._runner = StageRunner(
            self._job,
            source=source,
            model=model,
            observer=self._observer,
            rows=self._rows,
            started_at=self._started_at,
        )
        try:
            folder.note_versions(runner.versions)
            return self._run_on(runner, source_rows=source_rows, source=source, done=done)
        finally:
            runner.close()

    def _run_on(self, runner: StageRunner, *, source_rows: Input, source: ModelSource, done: np.ndarray) -> bool:
        job = self._job
        began = time.monotonic()
        tokenizer = load_tokenizer(source)
        self._model_files_s += time.monotonic() - began
        staging = Staging.create(self._output.staging, input=source_rows, done=done)
        stages = RunStages(job, input=source_rows, staging=staging, folder=self._output.staging)
        schema = completion_schema(
            [*source_rows.carried, *stages.completion_fields],
            with_token_ids=job.output.token_ids,
            with_logprobs=stages.jobs[-1].sampling.logprobs is not None or source_rows.holds_requests,
        )
        writer = self._writer = OutputWriter(self._output, schema=schema, kept=stages.cells, model=source.name)
        try:
            return all(
                runner.run(
                    stages.open(number, tokenizer), tokenizer=tokenizer, writer=writer, should_stop=self._should_stop
                )
                for number in range(len(stages.jobs))
            )
        finally:
            # What is complete is written even when the run fails: nothing that was computed is lost.
            try:
                writer.close()
            finally:
                stages.close()

    def _should_stop(self) -> bool:
        return self._rows.gives_up or self._observer.should_stop()

    def _summary(self, rows: Input, model: str, finished: bool) -> RunSummary:
        runner, writer, answered = self._runner, self._writer, self._answered
        metrics = RunMetrics() if runner is None else runner.metrics
        engine_s = metrics.schedule_s + metrics.model_s + metrics.sample_s
        return RunSummary(
            name=self._job.name,
            run_id=self._output.run_id,
            output=self._output.path,
            finished=finished,
            num_rows=rows.num_rows,
            rows_before=self._rows.before,
            rows_completed=answered.completed + (0 if writer is None else writer.rows_completed),
            rows_failed=answered.failed + (0 if writer is None else writer.rows_failed),
            wall_s=time.monotonic() - self._started_at,
            load_s=self._model_files_s + (0.0 if runner is None else runner.load_s),
            prompt_tokens=metrics.prompt_tokens,
            unique_prompt_tokens=0 if runner is None else runner.unique_prompt_tokens,
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
            device="none" if runner is None else runner.device,
            dtype="none" if runner is None else runner.dtype,
            kernels="none" if runner is None else runner.kernels,
            model=model,
            too_many_errors=self._rows.errors.reason if self._rows.errors is not None else None,
            tiers=None if runner is None else runner.tiers,
            drafted_tokens=metrics.drafted_tokens,
            accepted_tokens=metrics.accepted_tokens,
            roofline=runner.roofline() if finished and runner is not None else None,
        )
