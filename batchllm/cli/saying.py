"""One line on stderr for whoever watches."""

from __future__ import annotations

import click


def say(line: str) -> None:
    """Writes the line, or leaves it: a log on a full disk or a pipe that nobody reads must not end a run, nor does a closed stderr."""
    try:
        click.echo(line, err=True)
    except (OSError, ValueError):
        return
