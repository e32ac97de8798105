"""`batchllm backfill`: runs a job file for each of several dates."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Literal

import click

from batchllm.cli.options import run_options, stop_rules
from batchllm.cli.paths import GivenPath
from batchllm.cli.saying import put


@click.command()
@click.argument("job_file", type=GivenPath())
@click.option("--from", "first", type=click.DateTime(["%Y-%m-%d"]), required=True, help="The first date.")
@click.option("--to", "last", type=click.DateTime(["%Y-%m-%d"]), required=True, help="The last date; it is run too.")
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print each date's summary as a line of JSON; nothing else.")
@click.pass_context
def backfill(
    context: click.Context,
    job_file: Path,
    first: datetime.datetime,
    last: datetime.datetime,
    overrides: tuple[str, ...],
    limit: int | None,
    deadline: str | None,
    max_error_rate: str | None,
    retry_errors: bool,
    log_format: Literal["text", "json"],
    as_json: bool,
) -> None:
    """Run JOB_FILE for each date, in order; dates that are complete already take no time.

    A date with error rows does not keep the next from running; one that cannot be finished does. The exit code is the worst.
    """
    from batchllm.cli.progress import open_view
    from batchllm.cli.stopping import StopWish

    with open_view(log_format, name=job_file.stem, quiet=as_json) as view:
        rules = stop_rules(deadline=deadline, max_error_rate=max_error_rate)
        # Before the imports: they take seconds, and a night's stop may come during them.
        stop = StopWish(deadline=rules.deadline, say=view.warn)

        from batchllm.cli.summary import summary_text
        from batchllm.job import Job
        from batchllm.nightly.backfill import DateResult, load_dates, worst_exit_code
        from batchllm.nightly.backfill import backfill as run_dates
        from batchllm.run_job import RunOptions
        from batchllm.run_progress import Observer
        from batchllm.run_summary import summary_values

        jobs = load_dates(job_file, overrides=overrides, first=first.date(), last=last.date())
        view.note(f"{first.date()} to {last.date()}: {len(jobs):,} date{'' if len(jobs) == 1 else 's'}")
        shown = view

        results: list[DateResult] = []

        def observer(job: Job) -> Observer:
            nonlocal shown
            shown.close()
            shown = view.for_date(job.name, job.date)
            shown.note(f"date {len(results) + 1:,} of {len(jobs):,}")
            return Observer(note=shown.note, progress=shown.update, should_stop=stop.asked)

        options = RunOptions(limit=limit, retry_errors=retry_errors, max_error_rate=rules.max_error_rate)
        for result in run_dates(jobs, job_file=job_file, options=options, observer=observer):
            results.append(result)
            shown.close()
            error = str(result.error) if result.error is not None else None
            if result.summary is not None:
                error = result.summary.failure
                shown.summary(summary_values(result.summary))
            if as_json:
                values = {"exit_code": result.exit_code} if result.summary is None else summary_values(result.summary)
                put(json.dumps({"date": str(result.date), **values, "error": error}))
            elif result.summary is not None:
                put(f"{result.date} {summary_text(result.summary)}")
            if error is not None:
                view.error(f"{result.date}: {error}", exit_code=result.exit_code)
        if len(results) < len(jobs):
            code = worst_exit_code(results)
            view.error(f"{len(jobs) - len(results)} of {len(jobs)} dates were not begun", exit_code=code)
    context.exit(worst_exit_code(results))
