"""`batchllm plan`: EXPLAIN for a job."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import click

from batchllm.cli.paths import GivenPath
from batchllm.cli.saying import put, say


@click.command()
@click.argument("job_file", type=GivenPath())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job, as for run.")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="The date that the job sees; default today.")
@click.option("--limit", type=click.IntRange(min=1), help="Plan the first rows only.")
@click.option("--analyze", is_flag=True, help="Compare the last run with what was predicted for it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; nothing else.")
def plan(
    job_file: Path,
    overrides: tuple[str, ...],
    date: datetime.datetime | None,
    limit: int | None,
    analyze: bool,
    as_json: bool,
) -> None:
    """Say what running JOB_FILE would take: tokens, sharing, memory, time, and what would make it cheaper.

    The model's weights are not loaded, nothing is written, and a run may be going on meanwhile.
    """
    from batchllm.job import load_job
    from batchllm.planning import plan_job
    from batchllm.planning_analysis import analyze_last_run

    if analyze and limit is not None:
        raise click.UsageError("--analyze compares a run that was; --limit is for a plan")
    job = load_job(job_file, overrides=overrides, date=date.date() if date else None)

    def note(line: str) -> None:
        if not as_json:
            say(f"{job.name}: {line}")

    result = analyze_last_run(job, note=note) if analyze else plan_job(job, limit=limit, note=note)
    put(json.dumps(result.to_json(), ensure_ascii=False) if as_json else result.to_text())
