"""`batchllm run`: runs a job file."""

from __future__ import annotations

import dataclasses
import datetime
import json
import signal
import time
from pathlib import Path
from types import FrameType

import click


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job, as in engine.block_size=32."
)
@click.option(
    "--date",
    type=click.DateTime(["%Y-%m-%d"]),
    help="The date that the job sees; default today, or that of the run it resumes.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Run the first rows only.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON; nothing else.")
@click.pass_context
def run(
    context: click.Context,
    job_file: Path,
    overrides: tuple[str, ...],
    date: datetime.datetime | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Run JOB_FILE: what is done already stays, the rest is computed and written.

    Exit codes: 0 every row completed, 1 the job could not run or no row of it completed, 2 wrong usage, 3 finished with error rows, 4 another run is at it,
    130 stopped (run it again to finish).
    """
    # Before the imports: they take seconds, and a night's stop may come during them.
    stop = _StopSignals()
    from batchllm.cli.progress import ProgressView
    from batchllm.cli.summary import summary_text
    from batchllm.data.parts import recorded_date
    from batchllm.job import load_job
    from batchllm.run import Observer, run_job

    job = load_job(job_file, overrides=overrides, date=date.date() if date else None)
    if date is None:
        # A resume after midnight goes on with the date under which its rows were written.
        recorded = recorded_date(Path(job.output.path))
        if recorded is not None and recorded != job.date:
            job = load_job(job_file, overrides=overrides, date=recorded)
    with ProgressView(name=job.name, quiet=as_json) as view:
        observer = Observer(note=view.note, progress=view.update, should_stop=stop.asked)
        summary = run_job(job, limit=limit, observer=observer)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(summary), "exit_code": summary.exit_code}, default=str))
    else:
        click.echo(summary_text(summary))
    context.exit(summary.exit_code)


class _StopSignals:
    """Turns the first SIGINT or SIGTERM into a wish to stop after the step; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            click.echo("stopping after this step; what is done is kept", err=True)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def asked(self) -> bool:
        return self._asked_at is not None
