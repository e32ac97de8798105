"""What a person sees while a job runs: a bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import click
from tqdm import tqdm

from batchllm.run import Progress

_LINE_INTERVAL_S = 10.0


class ProgressView:
    """Shows `Progress` as it comes. A context manager: leaving it closes the bar."""

    def __init__(self, *, name: str, quiet: bool) -> None:
        self._name = name
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

    def note(self, text: str) -> None:
        """One line that stays."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.clear()
        click.echo(f"{self._name}: {text}", err=True)

    def update(self, progress: Progress) -> None:
        """The state of the run; called after each step."""
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._draw(progress)
        elif time.monotonic() >= self._next_line_at or progress.rows_done == progress.rows_total:
            self._next_line_at = time.monotonic() + _LINE_INTERVAL_S
            self.note(f"{progress.rows_done}/{progress.rows_total} rows, {_rates(progress)}, ETA {_eta(progress)}")

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=progress.rows_total, initial=progress.rows_before, desc=self._name, unit="row", dynamic_ncols=True
            )
        self._bar.set_postfix_str(_rates(progress), refresh=False)
        self._bar.update(progress.rows_done - self._bar.n)
        self._bar.refresh()


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
