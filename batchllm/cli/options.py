"""Options that several commands share, and what they become."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def run_options(command: _Command) -> _Command:
    """The options of a run that hold for one date and for many; the command takes them as keyword arguments."""
    for option in reversed(
        [
            click.option(
                "--set",
                "overrides",
                multiple=True,
                metavar="KEY=VALUE",
                help="Set a key of the job, as in engine.block_size=32.",
            ),
            click.option("--limit", type=click.IntRange(min=1), help="Run the first rows only."),
            click.option(
                "--deadline", metavar="TIME", help="Stop at the next 06:00, or at 2026-11-30T06:00; resumable."
            ),
            click.option(
                "--max-error-rate",
                metavar="SHARE",
                help="Give up with exit code 1 once more than 5% of all rows are sure to carry an error.",
            ),
            click.option("--retry-errors", is_flag=True, help="Run rows that carry an error again."),
            click.option(
                "--log-format",
                type=click.Choice(["text", "json"]),
                default="text",
                show_default=True,
                help="What is said on stderr: lines for a person, or one JSON object a line.",
            ),
        ]
    ):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class StopRules:
    """`--deadline` and `--max-error-rate`, checked."""

    deadline: datetime.datetime | None
    max_error_rate: float | None


def stop_rules(*, deadline: str | None, max_error_rate: str | None) -> StopRules:
    """Raises JobError for a text that is neither. Imports nothing heavy."""
    from batchllm.nightly.deadline import parse_deadline
    from batchllm.nightly.error_rate import parse_error_rate

    now = datetime.datetime.now().astimezone()
    return StopRules(
        deadline=None if deadline is None else parse_deadline(deadline, now=now),
        max_error_rate=None if max_error_rate is None else parse_error_rate(max_error_rate),
    )
