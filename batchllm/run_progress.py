"""A run while it is under way: who watches it, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from batchllm.data.error_count import ErrorCount
from batchllm.engine.metrics import RunMetrics
from batchllm.planner.plan import Plan

_RATE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A run under way. Rates over the last seconds; `eta_s` None until there is something to go by."""

    rows_total: int
    rows_before: int
    rows_done: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    kv_share: float
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Observer:
    """Who watches a run: `note` gets a line at each stage, `progress` the state after each step, `should_stop` is asked often."""

    note: Callable[[str], None] = lambda line: None
    progress: Callable[[Progress], None] = lambda progress: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class RowCounts:
    """Rows of a run: all, answered by earlier runs, answered; `errors` where a limit was set."""

    total: int = 0
    before: int = 0
    done: int = 0
    errors: ErrorCount | None = None

    @property
    def gives_up(self) -> bool:
        return self.errors is not None and self.errors.is_too_high

    def count_failed(self, row_index: int) -> None:
        """A row carries an error."""
        if self.errors is not None:
            self.errors.add(row_index)


class ProgressTracker:
    """Rates over a sliding window, and the time that is left by the share of tokens that are done."""

    def __init__(self, plan: Plan, *, rows_total: int, rows_before: int) -> None:
        self._rows_total = rows_total
        self._rows_before = rows_before
        self._expected_tokens = plan.unique_prompt_tokens + int(plan.decode_tokens.sum())
        self._started_at = time.monotonic()
        self._window: list[tuple[float, int, int]] = [(self._started_at, 0, 0)]

    def advance(self, metrics: RunMetrics, *, kv_share: float, rows_done: int) -> Progress:
        """The state after a step: `metrics` of the stage, `kv_share` of the pool in use, `rows_done` of the run."""
        now = time.monotonic()
        prompt_tokens, output_tokens = metrics.computed_prompt_tokens, metrics.generated_tokens
        if now - self._window[-1][0] > _RATE_WINDOW_S / 20:
            self._window.append((now, prompt_tokens, output_tokens))
        while len(self._window) > 2 and now - self._window[1][0] > _RATE_WINDOW_S:
            self._window.pop(0)
        since, prompt_then, output_then = self._window[0]
        seconds = max(now - since, 1e-6)
        share = (prompt_tokens + output_tokens) / max(self._expected_tokens, 1)
        rows_share = (rows_done - self._rows_before) / max(self._rows_total - self._rows_before, 1)
        # Rows that stop early make the tokens that were expected too many; then rows tell better.
        share = min(max(share, rows_share), 1.0)
        elapsed = now - self._started_at
        return Progress(
            rows_total=self._rows_total,
            rows_before=self._rows_before,
            rows_done=rows_done,
            prompt_tokens_per_s=(prompt_tokens - prompt_then) / seconds,
            output_tokens_per_s=(output_tokens - output_then) / seconds,
            kv_share=kv_share,
            eta_s=elapsed * (1 - share) / share if share > 0.01 else None,
        )
