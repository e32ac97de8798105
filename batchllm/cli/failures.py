"""What ends a command early, as one line and an exit code: the same in a log of JSON lines as on a terminal."""

from __future__ import annotations

from typing import NamedTuple

import click

from batchllm.errors import BatchLLMError


class Failure(NamedTuple):
    line: str
    exit_code: int


def known_failure(error: BaseException) -> Failure | None:
    """What to say of the error; None for one that is a mistake of this program, whose traceback is wanted."""
    if isinstance(error, click.ClickException):
        return Failure(_usage_line(error), error.exit_code)
    if isinstance(error, BatchLLMError):
        return Failure(str(error), error.exit_code)
    # torch has no error of its own for memory on the processor.
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return Failure("this machine's memory does not suffice", BatchLLMError.exit_code)
    if isinstance(error, OSError):
        # Help, or a file of the system that no command expects to fail.
        place = "a file or standard output" if error.filename is None else error.filename
        return Failure(f"{place}: {error.strerror or error}", BatchLLMError.exit_code)
    return None


def _usage_line(error: click.ClickException) -> str:
    """Click's message, and where more is to be read."""
    context = getattr(error, "ctx", None)
    if context is None:
        context = click.get_current_context(silent=True)
    command = "batchllm" if context is None else context.command_path
    return f"{error.format_message().rstrip('.')} (see {command} --help)"
