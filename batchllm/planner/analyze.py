"""Predicted beside actual, after a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchllm.planner.explanation import Explanation

_PEAK = "peak live tokens"


@dataclass(frozen=True, slots=True)
class Actual:
    """What a run measured, in the terms of its explanation."""

    computed_prompt_tokens: int
    decode_tokens: int
    num_steps: int
    peak_live_tokens: int
    prefill_s: float
    decode_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure: predicted, actual, and actual ÷ predicted (None where nothing was predicted)."""

    name: str
    predicted: float
    actual: float

    @property
    def ratio(self) -> float | None:
        return self.actual / self.predicted if self.predicted else None


def compare_with_actual(explanation: Explanation, actual: Actual) -> tuple[Comparison, ...]:
    """Each predicted figure beside what the run measured. Decode counts its attention and first writes."""
    prediction = explanation.prediction
    tokens = (
        Comparison("computed prompt tokens", explanation.computed_prompt_tokens, actual.computed_prompt_tokens),
        Comparison("generated tokens", explanation.expected_decode_tokens, actual.decode_tokens),
        Comparison("steps", explanation.num_steps, actual.num_steps),
        Comparison(_PEAK, explanation.peak_live_tokens, actual.peak_live_tokens),
    )
    if prediction is None:
        return tokens
    return (
        *tokens,
        Comparison("prefill s", prediction.prefill_s, actual.prefill_s),
        Comparison("decode s", prediction.total_s - prediction.transfer_s - prediction.prefill_s, actual.decode_s),
        Comparison("total s", prediction.total_s, actual.total_s),
    )


def add_up(parts: Sequence[tuple[Comparison, ...]]) -> tuple[Comparison, ...]:
    """The comparisons of parts that ran one after the other as one: sums, and of the peak the highest."""
    return tuple(
        Comparison(
            rows[0].name,
            (max if rows[0].name == _PEAK else sum)(row.predicted for row in rows),
            (max if rows[0].name == _PEAK else sum)(row.actual for row in rows),
        )
        for rows in zip(*parts, strict=True)
    )


def comparison_text(comparisons: tuple[Comparison, ...]) -> str:
    """A table for a person at a terminal."""
    lines = [f"{'':<24} {'predicted':>16} {'actual':>16} {'actual/predicted':>17}"]
    for row in comparisons:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"{row.name:<24} {_figure(row.predicted):>16} {_figure(row.actual):>16} {ratio:>17}")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
