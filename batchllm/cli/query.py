"""`batchllm query`: SQL over a job's output."""

from __future__ import annotations

import datetime
import io
import sys
from pathlib import Path
from typing import TextIO, get_args

import click

from batchllm.cli.formats import TableFormat
from batchllm.cli.paths import GivenPath, ReplacedFile, check_apart, check_beside_parts
from batchllm.cli.saying import one_line, put, say

_PROMPT = "sql> "


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="[SQL] JOB_FILE")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job, as for run.")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="The date of the run; default today.")
@click.option(
    "--format",
    "table_format",
    type=click.Choice(get_args(TableFormat)),
    default="table",
    help="How rows are written; parquet needs --output.",
)
@click.option("--json", "table_format", flag_value="json", help="The same as --format json.")
@click.option("--output", "output_file", type=ReplacedFile(), help="Write to this file.")
@click.option("--views", is_flag=True, help="Print the SQL that defines the views, for use without this program.")
def query(
    arguments: tuple[str, ...],
    overrides: tuple[str, ...],
    date: datetime.datetime | None,
    table_format: TableFormat,
    output_file: Path | None,
    views: bool,
) -> None:
    """Run SQL over the views `completions`, `errors`, `runs`, `steps` and `tiers` of JOB_FILE's output.

    Without SQL: a prompt on a terminal, or the statement from standard input.
    """
    from batchllm.job import load_job

    if len(arguments) > 2 or (views and len(arguments) > 1):
        raise click.UsageError("give one SQL statement, in quotes, and one job file")
    if table_format == "parquet" and output_file is None and not views:
        raise click.UsageError("--format parquet needs --output FILE")
    job_file = GivenPath().convert(arguments[-1], None, None)
    check_apart({"the job file": job_file, "--output": output_file})
    job = load_job(job_file, overrides=overrides, date=date.date() if date else None)
    folder = Path(job.output.path)
    check_beside_parts({"--output": output_file}, folder=folder)
    if views:
        from batchllm.data.results import view_statements

        put(";\n".join(view_statements(folder, warn=say)) + ";")
    elif len(arguments) == 2:
        _answer(arguments[0], folder, table_format=table_format, output_file=output_file)
    elif sys.stdin is None:
        raise click.UsageError("standard input is closed; give the SQL statement as an argument")
    elif sys.stdin.isatty():
        _ask(folder, table_format=table_format, output_file=output_file)
    else:
        _answer(_statement(sys.stdin), folder, table_format=table_format, output_file=output_file)


def _statement(file: TextIO) -> str:
    """The whole of the file. What is no text is left for the statement's own check."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="surrogateescape")
    return file.read()


def _answer(sql: str, folder: Path, *, table_format: TableFormat, output_file: Path | None) -> None:
    from batchllm.cli.formats import write_table
    from batchllm.data.results import query as run_query

    write_table(run_query(sql, folder, warn=say), table_format=table_format, output_file=output_file)


def _ask(folder: Path, *, table_format: TableFormat, output_file: Path | None) -> None:
    """Statement after statement until the end of input; a mistake is said and forgotten."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    from batchllm.errors import BatchLLMError
    from batchllm.models.registry import cache_home

    home = cache_home()
    home.mkdir(parents=True, exist_ok=True)
    session: PromptSession[str] = PromptSession(history=FileHistory(str(home / "query_history")))
    say("views: completions, errors, runs, steps, tiers; Ctrl-D ends")
    while True:
        try:
            sql = session.prompt(_PROMPT)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if sql.strip():
            try:
                _answer(sql, folder, table_format=table_format, output_file=output_file)
            except BatchLLMError as error:
                say(f"batchllm: {one_line(str(error))}")
