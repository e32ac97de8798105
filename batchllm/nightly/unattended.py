"""One run with all that must happen whatever becomes of it: summary file, metrics, and the job's own command."""

from __future__ import annotations

import contextlib
import datetime
import tempfile
from dataclasses import dataclass
from pathlib import Path

from batchllm.data.replaced_file import check_place
from batchllm.errors import BatchLLMError, FolderError, OutputError, write_error
from batchllm.job import Job
from batchllm.nightly.commands import run_command
from batchllm.nightly.metrics_file import write_metrics
from batchllm.nightly.outcome import Outcome, write_summary
from batchllm.run_job import RunOptions, run_job
from batchllm.run_progress import Observer
from batchllm.run_summary import RunSummary


@dataclass(frozen=True, slots=True)
class Reports:
    """The files that the user asked for."""

    summary: Path | None = None
    metrics: Path | None = None


def run_unattended(
    job: Job, *, job_file: Path, options: RunOptions, reports: Reports, observer: Observer
) -> RunSummary:
    """Runs the job as `run_job` does and raises what it raises; before that, reports and commands are done.

    Raises FolderError, before the run, where a report's place is wrong; OutputError where one cannot be written and nothing worse happened.
    """
    started_at = datetime.datetime.now().astimezone()

    def report(*, exit_code: int, error: str | None, summary: RunSummary | None) -> str | None:
        """What could not be written, after all else was done."""
        outcome = Outcome(
            job=job,
            job_file=job_file.absolute(),
            exit_code=exit_code,
            error=error,
            started_at=started_at,
            ended_at=datetime.datetime.now().astimezone(),
            summary=summary,
        )
        return _report(outcome, reports=reports, observer=observer)

    try:
        for path in (reports.summary, reports.metrics):
            if path is not None:
                check_place(path)
        summary = run_job(job, options=options, observer=observer)
    except Exception as error:
        code = error.exit_code if isinstance(error, BatchLLMError) else BatchLLMError.exit_code
        text = str(error) if isinstance(error, BatchLLMError) else f"{type(error).__name__}: {error}"
        failure = report(exit_code=code, error=text, summary=None)
        if failure is not None and text not in failure:
            observer.note(failure)
        raise
    failure = report(exit_code=summary.exit_code, error=summary.failure, summary=summary)
    if failure is not None:
        raise OutputError(failure)
    return summary


def _report(outcome: Outcome, *, reports: Reports, observer: Observer) -> str | None:
    failures = []
    summary: Path | None = None
    try:
        if reports.summary is not None:
            write_summary(outcome, reports.summary)
            summary = reports.summary
    except (FolderError, OutputError) as error:
        failures.append(str(error))
    try:
        if reports.metrics is not None:
            write_metrics(outcome, reports.metrics)
    except (FolderError, OutputError) as error:
        failures.append(str(error))
    if outcome.job.on_success or outcome.job.on_failure:
        with contextlib.ExitStack() as stack:
            if summary is None:
                # The command gets a summary also where the user keeps none.
                try:
                    summary = _temporary_summary(outcome, stack)
                except (FolderError, OutputError) as error:
                    observer.note(f"the command of the job gets no summary: {error}")
            run_command(outcome, summary_path=summary, say=observer.note)
    return "; ".join(failures) or None


def _temporary_summary(outcome: Outcome, stack: contextlib.ExitStack) -> Path:
    """In a folder that goes with `stack`. Raises FolderError or OutputError where none can be written."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="batchllm-", ignore_cleanup_errors=True)
    except OSError as error:
        raise write_error(f"{error.filename or 'a temporary folder'}: cannot be made", error) from None
    path = Path(stack.enter_context(temporary)) / "summary.json"
    write_summary(outcome, path)
    return path
