"""What a run says, as JSON lines on stderr: for whoever collects logs. The human form is `batchllm.cli.progress`."""

from __future__ import annotations

import datetime
import json
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

import click

from batchllm.cli.failures import known_failure
from batchllm.cli.saying import drop_output, say
from batchllm.errors import StoppedError

if TYPE_CHECKING:  # a log is there before the imports that take time
    from batchllm.run_progress import Progress

_PROGRESS_INTERVAL_S = 10.0


class JsonLog:
    """One object a line: `time` (ISO 8601, UTC), `level` (info, warning, error), `event`, `job`, and the event's own fields.

    Events: `note` and `warning` with `message`; `progress`, at most one in ten seconds and one at the end; `summary` with what
    `run --json` prints; `error` with `message` and `exit_code`. Leaving it with an error writes that and ends the command.
    """

    def __init__(self, *, name: str, date: datetime.date | None = None) -> None:
        """`name`: of the job, or of its file until that is read. `date`: of several, the one that this is about."""
        self.name = name
        self._date = {} if date is None else {"date": str(date)}
        self._next_progress_at = 0.0

    def __enter__(self) -> JsonLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, click.exceptions.Exit):
            return
        code, fields = 1, {}
        failure = known_failure(error)
        if isinstance(error, (KeyboardInterrupt, click.exceptions.Abort)):
            code, text = StoppedError.exit_code, "interrupted"
        elif failure is not None:
            text, code = failure
            if isinstance(error, OSError):
                drop_output()
        else:
            text, fields = f"{type(error).__name__}: {error}", {"traceback": "".join(traceback.format_exception(error))}
        self.error(text, exit_code=code, **fields)
        raise click.exceptions.Exit(code) from None

    def for_date(self, name: str, date: datetime.date) -> JsonLog:
        """The log of one of several dates."""
        return JsonLog(name=name, date=date)

    def close(self) -> None:
        """Nothing is held."""

    def note(self, text: str) -> None:
        """What happens."""
        self._write("note", {"message": text})

    def warn(self, text: str) -> None:
        """What someone should look at."""
        self._write("warning", {"message": text}, level="warning")

    def error(self, text: str, *, exit_code: int, **fields: object) -> None:
        """Why the command ends, or a part of it did."""
        self._write("error", {"message": text, "exit_code": exit_code, **fields}, level="error")

    def update(self, progress: Progress) -> None:
        """The state of the run; called after each step."""
        if time.monotonic() < self._next_progress_at and progress.rows_done < progress.rows_total:
            return
        self._next_progress_at = time.monotonic() + _PROGRESS_INTERVAL_S
        self._write(
            "progress",
            {
                "rows_total": progress.rows_total,
                "rows_before": progress.rows_before,
                "rows_done": progress.rows_done,
                "prompt_tokens_per_s": round(progress.prompt_tokens_per_s, 1),
                "output_tokens_per_s": round(progress.output_tokens_per_s, 1),
                "kv_share": round(progress.kv_share, 4),
                "eta_s": None if progress.eta_s is None else round(progress.eta_s, 1),
            },
        )

    def summary(self, values: Mapping[str, object]) -> None:
        """What came of the run."""
        self._write("summary", dict(values))

    def _write(self, event: str, fields: Mapping[str, object], *, level: str = "info") -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "level": level, "event": event, "job": self.name, **self._date, **fields}
        say(json.dumps(record, ensure_ascii=False, default=str))
