"""What a command says: lines for whoever watches on stderr, what it was asked for on stdout."""

from __future__ import annotations

import os

import click

from batchllm.errors import OutputError

_STANDARD_OUTPUT = 1


def say(line: str) -> None:
    """Writes the line to stderr, or leaves it: a log on a full disk or a pipe that nobody reads must not end a run, nor does a closed stderr."""
    try:
        click.echo(line, err=True)
    except (OSError, ValueError):
        return


def one_line(text: str) -> str:
    """The text as one line that a terminal shows as it is: characters that it would obey, or cannot show, are escaped."""
    line = " ".join(part.strip() for part in text.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)


def put(content: str | bytes, *, newline: bool = True) -> None:
    """Writes to stdout. A reader that has seen enough, as `head` has, ends nothing; raises OutputError for a full disk."""
    try:
        click.echo(content, nl=newline)
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        drop_output()
        raise OutputError(f"standard output: cannot be written: {error.strerror}") from None


def drop_output() -> None:
    """What is still to be written to stdout goes nowhere: Python would try it again at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STANDARD_OUTPUT)
    os.close(nowhere)
