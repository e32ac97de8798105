"""What a person sees while a job runs: a bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from batchllm.cli.log import JsonLog
from batchllm.cli.saying import say

if TYPE_CHECKING:  # a view is there before the imports that take time
    from tqdm import tqdm

    from batchllm.run_progress import Progress

_LINE_INTERVAL_S = 10.0


class ProgressView:
    """Shows `Progress` as it comes. A context manager: leaving it closes the bar."""

    def __init__(self, *, name: str, quiet: bool) -> None:
        """`name`: of the job, or of its file until that is read. `quiet`: errors and warnings only."""
        self.name = name
        self._quiet = quiet
        self._bar: tqdm | None = None
        self._next_line_at = 0.0

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the bar; a second call does nothing."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def for_date(self, name: str, date: datetime.date) -> ProgressView:
        """The view of one of several dates."""
        return ProgressView(name=f"{name} {date}", quiet=self._quiet)

    def note(self, text: str) -> None:
        """One line that stays."""
        if not self._quiet:
            self._say(f"{self.name}: {text}")

    def warn(self, text: str) -> None:
        """One line that someone should look at."""
        self._say(text)

    def error(self, text: str, *, exit_code: int) -> None:
        """Why the command ends, or a part of it did."""
        self._say(f"batchllm: {text}")

    def summary(self, values: Mapping[str, object]) -> None:
        """Nothing: the summary goes to standard output."""

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        say(text)

    def update(self, progress: Progress) -> None:
        """The state of the run; called after each step."""
        if self._quiet:
            return
        if sys.stderr is not None and sys.stderr.isatty():
            self._draw(progress)
        elif time.monotonic() >= self._next_line_at or progress.rows_done == progress.rows_total:
            self._next_line_at = time.monotonic() + _LINE_INTERVAL_S
            self.note(f"{progress.rows_done}/{progress.rows_total} rows, {_rates(progress)}, ETA {_eta(progress)}")

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=progress.rows_total, initial=progress.rows_before, desc=self.name, unit="row", dynamic_ncols=True
            )
        self._bar.set_postfix_str(_rates(progress), refresh=False)
        self._bar.update(progress.rows_done - self._bar.n)
        self._bar.refresh()


def open_view(log_format: Literal["text", "json"], *, name: str, quiet: bool) -> ProgressView | JsonLog:
    """What `--log-format` asks for; `quiet` is for the human form."""
    return JsonLog(name=name) if log_format == "json" else ProgressView(name=name, quiet=quiet)


def _rates(progress: Progress) -> str:
    return (
        f"prompt {progress.prompt_tokens_per_s:,.0f} tok/s, output {progress.output_tokens_per_s:,.0f} tok/s, "
        f"KV {progress.kv_share:.0%}"
    )


def _eta(progress: Progress) -> str:
    if progress.eta_s is None:
        return "unknown"
    minutes, seconds = divmod(round(progress.eta_s), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
