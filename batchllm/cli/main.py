"""`batchllm`: the command line. Parses, calls one function, prints; a typed error becomes one line and an exit code."""

from __future__ import annotations

import sys
import traceback

import click

from batchllm import __version__
from batchllm.cli.backfill import backfill
from batchllm.cli.cache import cache
from batchllm.cli.doctor import doctor
from batchllm.cli.models import models
from batchllm.cli.plan import plan
from batchllm.cli.query import query
from batchllm.cli.report import report
from batchllm.cli.run import run
from batchllm.cli.schedule import schedule
from batchllm.cli.schema import schema
from batchllm.cli.simulate import simulate
from batchllm.errors import BatchLLMError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchllm")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Offline batch engine for language models: one job file in, Parquet out."""
    context.obj = {"debug": debug}


for command in (run, plan, report, backfill, schedule, query, doctor, models, schema, simulate, cache):
    cli.add_command(command)


def main() -> None:
    """Entry point: runs the command line and ends with the exit code of what happened."""
    debug = "--debug" in sys.argv[1:]
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BatchLLMError as error:
        if debug:
            traceback.print_exc()
        else:
            click.echo(f"batchllm: {error}", err=True)
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)
