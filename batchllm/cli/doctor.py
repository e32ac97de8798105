"""`batchllm doctor`: checks the machine, and a job where one is named."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import click

from batchllm.cli.paths import GivenPath
from batchllm.cli.saying import put


@click.command()
@click.argument("job_file", type=GivenPath(), required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job, as for run.")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="The date that the job sees; default today.")
@click.option(
    "--spill-folder",
    type=GivenPath(file_okay=False),
    help="The folder whose disk is measured; default the job's, else the cache folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; nothing else.")
@click.pass_context
def doctor(
    context: click.Context,
    job_file: Path | None,
    overrides: tuple[str, ...],
    date: datetime.datetime | None,
    spill_folder: Path | None,
    as_json: bool,
) -> None:
    """Say what this machine has for a run, what it lacks, and the remedy. Checks JOB_FILE too where it is named.

    Exit codes: 0 a run would work, 1 it would not, 2 wrong usage.
    """
    from batchllm.doctor import diagnose
    from batchllm.job import load_job

    if job_file is None and (overrides or date):
        raise click.UsageError("--set and --date are for a job; name its file")
    job = load_job(job_file, overrides=overrides, date=date.date() if date else None) if job_file is not None else None
    diagnosis = diagnose(job, spill_folder=spill_folder)
    put(json.dumps(diagnosis.to_json(), ensure_ascii=False) if as_json else diagnosis.to_text())
    context.exit(diagnosis.exit_code)
