"""Running a job for each of several dates, in order."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchllm.errors import BatchLLMError, JobError
from batchllm.job import Job, load_job
from batchllm.nightly.dates import same_output
from batchllm.nightly.unattended import Reports, run_unattended
from batchllm.run_job import RunOptions
from batchllm.run_progress import Observer
from batchllm.run_summary import RunSummary

_ERROR_ROWS = 3
MOST_DATES = 1000
"""Of one backfill: more are a slip of the pen, and would be years of silence before the first row."""


@dataclass(frozen=True, slots=True)
class DateResult:
    """What came of one date: a summary, or the error that kept it from running."""

    date: datetime.date
    summary: RunSummary | None
    error: BatchLLMError | None

    @property
    def exit_code(self) -> int:
        """That of the run."""
        if self.error is not None:
            return self.error.exit_code
        assert self.summary is not None
        return self.summary.exit_code

    @property
    def goes_on(self) -> bool:
        """Whether the next date is run: after a whole run, whatever its rows came to; not where too many errors ended it."""
        return self.summary is not None and self.summary.finished and self.summary.too_many_errors is None


def load_dates(job_file: Path, *, overrides: Sequence[str], first: datetime.date, last: datetime.date) -> list[Job]:
    """The job as each date from `first` to `last`, both included, sees it.

    Raises JobError where the file is wrong, the dates are out of order or too many, or two dates would share an output folder.
    """
    if last < first:
        raise JobError(f"--to {last} lies before --from {first}")
    num_days = (last - first).days + 1
    if num_days > MOST_DATES:
        raise JobError(
            f"--from {first} --to {last}: {num_days:,} dates; a backfill takes at most {MOST_DATES:,}, so run it in pieces"
        )
    jobs = [
        load_job(job_file, overrides=overrides, date=first + datetime.timedelta(days=days)) for days in range(num_days)
    ]
    if len({job.output.path for job in jobs}) < num_days:
        raise JobError(same_output(job_file))
    return jobs


def backfill(
    jobs: Sequence[Job], *, job_file: Path, options: RunOptions, observer: Callable[[Job], Observer]
) -> Iterator[DateResult]:
    """Runs the jobs in order and yields what came of each; ends after a date whose run could not be finished."""
    for job in jobs:
        try:
            summary = run_unattended(job, job_file=job_file, options=options, reports=Reports(), observer=observer(job))
            result = DateResult(job.date, summary, None)
        except BatchLLMError as error:
            result = DateResult(job.date, None, error)
        yield result
        if not result.goes_on:
            return


def worst_exit_code(results: Sequence[DateResult]) -> int:
    """That of the last date that did not run to its end or completed no row, else 3 if any date has error rows, else 0."""
    codes = [result.exit_code for result in results]
    stopped = [code for code in codes if code not in (0, _ERROR_ROWS)]
    return stopped[-1] if stopped else max(codes, default=0)
