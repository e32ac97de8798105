"""`batchllm run`: runs a job file."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Literal

import click

from batchllm.cli.options import run_options, stop_rules
from batchllm.cli.paths import GivenPath, ReplacedFile, check_apart, check_beside_parts
from batchllm.cli.saying import put


@click.command()
@click.argument("job_file", type=GivenPath())
@run_options
@click.option(
    "--date",
    type=click.DateTime(["%Y-%m-%d"]),
    help="The date that the job sees; default today, or that of the run it resumes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; nothing else.")
@click.option("--summary", "summary_file", type=ReplacedFile(), help="Write the summary as JSON here.")
@click.option(
    "--metrics",
    "metrics_file",
    type=ReplacedFile(),
    help="Write Prometheus metrics here, for a textfile collector.",
)
@click.pass_context
def run(
    context: click.Context,
    job_file: Path,
    overrides: tuple[str, ...],
    limit: int | None,
    deadline: str | None,
    max_error_rate: str | None,
    retry_errors: bool,
    log_format: Literal["text", "json"],
    date: datetime.datetime | None,
    as_json: bool,
    summary_file: Path | None,
    metrics_file: Path | None,
) -> None:
    """Run JOB_FILE: what is done already stays, the rest is computed and written.

    Exit codes: 0 every row completed, 1 the job could not run, no row of it completed or too many failed, 2 wrong usage, 3 finished with
    error rows, 4 another run is at it, 130 stopped (run it again to finish).
    """
    from batchllm.cli.progress import open_view
    from batchllm.cli.stopping import StopWish

    with open_view(log_format, name=job_file.stem, quiet=as_json) as view:
        check_apart({"the job file": job_file, "--summary": summary_file, "--metrics": metrics_file})
        rules = stop_rules(deadline=deadline, max_error_rate=max_error_rate)
        # Before the imports: they take seconds, and a night's stop may come during them.
        stop = StopWish(deadline=rules.deadline, say=view.warn)

        from batchllm.cli.summary import summary_text
        from batchllm.data.parts import recorded_date
        from batchllm.job import load_job
        from batchllm.nightly.dates import resumed_job
        from batchllm.nightly.unattended import Reports, run_unattended
        from batchllm.run_job import RunOptions
        from batchllm.run_progress import Observer
        from batchllm.run_summary import summary_values

        job = load_job(job_file, overrides=overrides, date=date.date() if date else None)
        view.name = job.name
        error_if_done = None
        if date is None:
            # A resume after midnight goes on with the date under which its rows were written.
            recorded = recorded_date(Path(job.output.path))
            if recorded is not None and recorded != job.date:
                job, error_if_done = resumed_job(job, job_file=job_file, overrides=overrides, recorded=recorded)
                if error_if_done is not None:
                    view.note(f"goes on with the run of {recorded}, whose rows are in {job.output.path}")
        check_beside_parts({"--summary": summary_file, "--metrics": metrics_file}, folder=Path(job.output.path))
        summary = run_unattended(
            job,
            job_file=job_file,
            options=RunOptions(
                limit=limit,
                retry_errors=retry_errors,
                max_error_rate=rules.max_error_rate,
                error_if_done=error_if_done,
            ),
            reports=Reports(summary=summary_file, metrics=metrics_file),
            observer=Observer(note=view.note, progress=view.update, should_stop=stop.asked),
        )
        view.close()
        view.summary(summary_values(summary))
        if summary.failure is not None:
            view.error(summary.failure, exit_code=summary.exit_code)
        put(json.dumps(summary_values(summary)) if as_json else summary_text(summary))
    context.exit(summary.exit_code)
