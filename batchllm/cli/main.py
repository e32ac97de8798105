"""`batchllm`: the command line. Parses, calls one function, prints; what goes wrong becomes one line and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback

import click

from batchllm import __version__
from batchllm.cli.backfill import backfill
from batchllm.cli.cache import cache
from batchllm.cli.doctor import doctor
from batchllm.cli.failures import known_failure
from batchllm.cli.models import models
from batchllm.cli.plan import plan
from batchllm.cli.query import query
from batchllm.cli.report import report
from batchllm.cli.run import run
from batchllm.cli.saying import drop_output, one_line, say
from batchllm.cli.schedule import schedule
from batchllm.cli.schema import schema
from batchllm.cli.simulate import simulate
from batchllm.errors import BatchLLMError, JobError, StoppedError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchllm")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Offline batch engine for language models: one job file in, Parquet out."""
    context.obj = {"debug": debug}
    try:
        os.getcwd()
    except OSError:
        raise JobError("the working folder is no longer there; change to another one") from None


for command in (run, plan, report, backfill, schedule, query, doctor, models, schema, simulate, cache):
    cli.add_command(command)


def main() -> None:
    """Entry point: runs the command line and ends with the exit code of what happened."""
    try:
        code = _run()
    except KeyboardInterrupt:
        code = StoppedError.exit_code
    # The command is over. Taking the interpreter down lasts a moment, in which Ctrl-C would put the signal in the place of the code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _run() -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding lacks is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        code = StoppedError.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except (click.ClickException, BatchLLMError, MemoryError, RuntimeError, OSError) as error:
        failure = known_failure(error)
        if failure is None:
            raise
        if isinstance(error, OSError):
            drop_output()
        code = _refuse(failure.line, exit_code=failure.exit_code)
    return code if isinstance(code, int) else 0


def _refuse(line: str, *, exit_code: int) -> int:
    if "--debug" in sys.argv[1:]:
        traceback.print_exc()
    else:
        say(f"batchllm: {one_line(line)}")
    return exit_code
