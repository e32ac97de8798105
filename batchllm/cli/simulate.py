"""`batchllm simulate`: what other sizes of pool and tiers would do."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import click

from batchllm.cli.paths import GivenPath
from batchllm.cli.saying import put, say


@click.command()
@click.argument("job_file", required=False, type=GivenPath())
@click.option("--trace", type=GivenPath(), help="Replay this trace (JSON lines with hash_ids) instead of a job.")
@click.option("--pool", default="25%", show_default=True, help="Device pool: a size, or a share of the working set.")
@click.option("--host", default="25%", show_default=True, help="Host memory tier, likewise; 0 for none.")
@click.option("--disk", default="0", show_default=True, help="Disk tier, likewise; 0 for none.")
@click.option(
    "--sequences", default=8, show_default=True, type=click.IntRange(min=1), help="Sequences that run at once."
)
@click.option("--rates", type=GivenPath(), help="JSON file with this machine's rates; times are then predicted.")
@click.option(
    "--kv-bytes-per-token",
    default=131_072,
    show_default=True,
    type=click.IntRange(min=1),
    help="For a trace: bytes of keys and values. The default is that of an 8B model.",
)
@click.option("--limit", type=click.IntRange(min=1), help="The first rows or requests only.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job, as for run.")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="The date that the job sees; default today.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; nothing else.")
def simulate(
    job_file: Path | None,
    trace: Path | None,
    pool: str,
    host: str,
    disk: str,
    sequences: int,
    rates: Path | None,
    kv_bytes_per_token: int,
    limit: int | None,
    overrides: tuple[str, ...],
    date: datetime.datetime | None,
    as_json: bool,
) -> None:
    """Replay JOB_FILE's plan, or a trace, against sizes of pool and tiers: hits, bytes moved, time, by policy.

    No model is run: the tiers' own code decides over blocks without bytes. `optimum` is the most that any choice could find.
    """
    from batchllm.cli.simulation_text import simulation_text
    from batchllm.job import load_job
    from batchllm.simulation import job_workload, read_rates, simulate_workload, trace_workload

    if (job_file is None) == (trace is None):
        raise click.UsageError("give a job file or --trace, one of them")
    if trace is not None:
        workload = trace_workload(trace, kv_bytes_per_token=kv_bytes_per_token, limit=limit)
    else:
        assert job_file is not None
        job = load_job(job_file, overrides=overrides, date=date.date() if date else None)
        workload = job_workload(job, limit=limit, note=lambda line: say(line))
    simulation = simulate_workload(
        workload,
        pool=pool,
        host=host,
        disk=disk,
        max_sequences=sequences,
        rates=None if rates is None else read_rates(rates),
    )
    put(json.dumps(simulation.to_json()) if as_json else simulation_text(simulation))
