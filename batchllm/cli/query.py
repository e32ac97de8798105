"""`batchllm query`: SQL over a job's output."""

from __future__ import annotations

import datetime
from pathlib import Path

import click


@click.command()
@click.argument("sql")
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job, as for run.")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="The date of the run; default today.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of rows.")
def query(sql: str, job_file: Path, overrides: tuple[str, ...], date: datetime.datetime | None, as_json: bool) -> None:
    """Run SQL over the views `completions` and `errors` of JOB_FILE's output."""
    from batchllm.cli.tables import as_json_rows, as_text_table
    from batchllm.data.results import query as run_query
    from batchllm.job import load_job

    job = load_job(job_file, overrides=overrides, date=date.date() if date else None)
    table = run_query(sql, job.output.path)
    click.echo(as_json_rows(table) if as_json else as_text_table(table))
