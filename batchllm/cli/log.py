"""What a run says, as JSON lines on stderr: for whoever collects logs. The human form is `batchllm.cli.progress`."""

from __future__ import annotations

import datetime
import json
import time
import traceback
from types import TracebackType

import click

from batchllm.run_progress import Progress

_PROGRESS_INTERVAL_S = 10.0


class JsonLog:
    """One object a line: `time` (ISO 8601, UTC), `level` (info, warning, error), `event`, `job`, and the event's own fields.

    Events: `note` and `warning` with `message`; `progress`, at most one in ten seconds and one at the end; `summary` with what
    `run --json` prints; `error` with `message` and `exit_code`.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._next_progress_at = 0.0

    def __enter__(self) -> JsonLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held."""

    def note(self, text: str) -> None:
        """What happens."""
        self.write("note", message=text)

    def warn(self, text: str) -> None:
        """What someone should look at."""
        self.write("warning", level="warning", message=text)

    def error(self, text: str, *, exit_code: int, **fields: object) -> None:
        """Why the command ends, or a part of it did."""
        self.write("error", level="error", message=text, exit_code=exit_code, **fields)

    def update(self, progress: Progress) -> None:
        """The state of the run; called after each step."""
        if time.monotonic() < self._next_progress_at and progress.rows_done < progress.rows_total:
            return
        self._next_progress_at = time.monotonic() + _PROGRESS_INTERVAL_S
        self.write(
            "progress",
            rows_total=progress.rows_total,
            rows_before=progress.rows_before,
            rows_done=progress.rows_done,
            prompt_tokens_per_s=round(progress.prompt_tokens_per_s, 1),
            output_tokens_per_s=round(progress.output_tokens_per_s, 1),
            kv_share=round(progress.kv_share, 4),
            eta_s=None if progress.eta_s is None else round(progress.eta_s, 1),
        )

    def write(self, event: str, *, level: str = "info", **fields: object) -> None:
        """One line."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "level": level, "event": event, "job": self._name, **fields}
        click.echo(json.dumps(record, ensure_ascii=False, default=str), err=True)
