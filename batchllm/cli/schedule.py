"""`batchllm schedule`: a job at a time of day, by cron or systemd."""

from __future__ import annotations

from pathlib import Path

import click

from batchllm.cli.paths import GivenPath, OutputFile, check_apart, check_beside_parts
from batchllm.cli.saying import put, say


@click.command()
@click.argument("job_file", type=GivenPath())
@click.argument("run_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- RUN_OPTIONS]")
@click.option("--at", metavar="HH:MM", help="The local time of day.")
@click.option("--as", "kind", type=click.Choice(["cron", "systemd"]), default="cron", show_default=True)
@click.option("--log", type=OutputFile(), help="Where the run's output is appended.")
@click.option(
    "--install", is_flag=True, help="Put the entry into your crontab, in the place of this job's earlier one."
)
@click.option("--remove", is_flag=True, help="Take this job's entry out of your crontab.")
@click.pass_context
def schedule(
    context: click.Context,
    job_file: Path,
    run_options: tuple[str, ...],
    at: str | None,
    kind: str,
    log: Path | None,
    install: bool,
    remove: bool,
) -> None:
    """Print an entry that runs JOB_FILE every day, or change your crontab.

    What stands behind `--` goes to `batchllm run`: `batchllm schedule job.yaml --at 02:30 -- --deadline 06:00`.
    """
    from batchllm.nightly.crontab import read_crontab, with_entry, without_entry, write_crontab

    if install and remove:
        raise click.UsageError("--install and --remove exclude each other")
    if (install or remove) and kind == "systemd":
        raise click.UsageError("only a crontab can be changed; save the printed units, their first lines say where")
    if remove:
        before = read_crontab()
        after = without_entry(before, job_file=job_file)
        if after != before:
            write_crontab(after)
        say(f"{job_file}: {'taken out of' if after != before else 'was not in'} your crontab")
        return
    if at is None:
        raise click.UsageError("Missing option '--at'.")

    from batchllm.cli.options import stop_rules
    from batchllm.cli.run import run
    from batchllm.errors import write_error
    from batchllm.job import load_job
    from batchllm.nightly.dates import check_outputs_apart
    from batchllm.nightly.schedule import cron_entry, scheduled_job, systemd_units

    # A mistake in the options is found now and not at night.
    try:
        with run.make_context("run", [str(job_file), *run_options], parent=context.find_root()) as parsed:
            values = parsed.params
    except click.UsageError as error:
        raise click.UsageError(f"behind --: {error.format_message()}", ctx=error.ctx) from None
    stop_rules(deadline=values["deadline"], max_error_rate=values["max_error_rate"])
    for key in ("summary_file", "metrics_file"):
        if values[key] is not None and not values[key].is_absolute():
            raise click.UsageError(f"{values[key]}: write an absolute path; a scheduler starts in another folder")
    written = {"--log": log, "--summary": values["summary_file"], "--metrics": values["metrics_file"]}
    check_apart({"the job file": job_file, **written})
    job = load_job(job_file, overrides=values["overrides"])
    check_beside_parts(written, folder=Path(job.output.path))
    if values["date"] is None:
        check_outputs_apart(job, job_file=job_file, overrides=values["overrides"])
    scheduled = scheduled_job(job_file, name=job.name, at=at, run_options=run_options, log=log)
    text = cron_entry(scheduled) if kind == "cron" else systemd_units(scheduled)
    # Without its folder the log could not be opened, and nothing would run.
    try:
        scheduled.log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(f"{scheduled.log}: no run could write its log", error) from None
    if install:
        write_crontab(with_entry(read_crontab(), job_file=job_file, entry=text))
        say(f"{job_file}: runs at {at} by your crontab; its output goes to {scheduled.log}")
    else:
        put(text, newline=False)
