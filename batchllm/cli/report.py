"""`batchllm report`: what a run did, as a page or as text."""

from __future__ import annotations

import datetime
import webbrowser
from pathlib import Path

import click

from batchllm.cli.paths import GivenPath, ReplacedFile, check_apart, check_beside_parts
from batchllm.cli.saying import put, say


@click.command()
@click.argument("job_file", type=GivenPath())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job, as for run.")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="The date of the run; default today.")
@click.option("--run", "run_id", metavar="RUN_ID", help="An earlier run of this output folder; default the last.")
@click.option("--text", "as_text", is_flag=True, help="Print the report instead of writing a page.")
@click.option("--json", "as_json", is_flag=True, help="Print its figures as JSON instead of writing a page.")
@click.option("--output", "output_file", type=ReplacedFile(), help="Where the page goes.")
@click.option("--open", "open_page", is_flag=True, help="Show the page in a browser.")
def report(
    job_file: Path,
    overrides: tuple[str, ...],
    date: datetime.datetime | None,
    run_id: str | None,
    as_text: bool,
    as_json: bool,
    output_file: Path | None,
    open_page: bool,
) -> None:
    """Write one HTML page about the last run of JOB_FILE, and print its path.

    The page holds everything it shows; it opens from disk and needs no network.
    """
    from batchllm.data.report import build_report
    from batchllm.job import load_job

    if as_text + as_json + (output_file is not None or open_page) > 1:
        raise click.UsageError("--text and --json print; --output and --open are for a page: choose one")
    check_apart({"the job file": job_file, "--output": output_file})
    job = load_job(job_file, overrides=overrides, date=date.date() if date else None)
    check_beside_parts({"--output": output_file}, folder=Path(job.output.path))
    made = build_report(Path(job.output.path), run_id=run_id, warn=say)
    if as_text:
        from batchllm.data.report_text import report_text

        put(report_text(made))
    elif as_json:
        from batchllm.data.report_text import report_json

        put(report_json(made))
    else:
        from batchllm.data.report_page import PAGE_FILE, write_page

        path = output_file or made.run.path / PAGE_FILE
        write_page(made, path)
        put(str(path))
        if open_page:
            webbrowser.open(path.resolve().as_uri())
