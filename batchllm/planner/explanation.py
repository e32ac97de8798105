"""The explanation of a plan, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from batchllm.planner.cost import Prediction, PrefillWork, Rates, predict
from batchllm.planner.demand import Demand

BAR_CHARACTERS = 30
TEXT_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class HistogramBar:
    """`num_prompts` have from `low` to `high` tokens, both included."""

    low: int
    high: int
    num_prompts: int


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A node of the prefix tree: `num_prompts` share the tokens at depths `[start, end)`, which begin with `text`."""

    start: int
    end: int
    num_prompts: int
    tokens_saved: int
    text: str


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """A stretch of a plan's load: the fields of `Demand` that have a value for each stretch."""

    duration: float
    running: float
    live_tokens: float
    read_tokens: float
    spared_tokens: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything `batchllm plan` prints. Tokens, bytes and seconds; `tail_share` as in `Demand`.

    `num_prompts` counts every sample of a row, `num_rows` the rows. KV bytes per row are those of one sample.
    `decode_tokens` may be generated, `expected_decode_tokens` are expected, as far as earlier runs tell. `prompt_pairs`: of a computed prompt
    token and one it attends to. `max_sequences` run at once; `ends_together`: so few, longest first, that they
    end with the longest row. `load`: a level for each number of sequences that run at once. `prediction` None without rates.
    """

    num_rows: int
    num_prompts: int
    prompt_tokens: int
    unique_prompt_tokens: int
    computed_prompt_tokens: int
    prompt_pairs: int
    reuse_ceiling: float
    decode_tokens: int
    expected_decode_tokens: int
    max_sequences: int
    ends_together: bool
    num_nodes: int
    histogram: tuple[HistogramBar, ...]
    biggest_nodes: tuple[SharedRun, ...]
    kv_bytes_per_token: int
    kv_bytes_per_row_mean: int
    kv_bytes_per_row_most: int
    peak_live_tokens: int
    peak_kv_bytes: int
    num_steps: int
    tail_share: float
    load: tuple[LoadLevel, ...]
    prediction: Prediction | None
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The same figures as plain dictionaries, lists, numbers and strings."""
        values = asdict(self)
        if self.prediction is not None:
            values |= {"predicted_total_s": self.prediction.total_s, "bottleneck": self.prediction.bottleneck}
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Explanation:
        """What `to_json` wrote, but for times and advice, which belong to the moment. Raises KeyError or TypeError for anything else."""
        names = {field.name for field in fields(cls)} - {"histogram", "biggest_nodes", "load", "prediction", "advice"}
        return cls(
            **{name: values[name] for name in names},
            histogram=tuple(HistogramBar(**bar) for bar in values["histogram"]),
            biggest_nodes=tuple(SharedRun(**run) for run in values["biggest_nodes"]),
            load=tuple(LoadLevel(**level) for level in values["load"]),
            prediction=None,
            advice=(),
        )

    def with_rates(self, rates: Rates) -> Explanation:
        """The same with times predicted from `rates`."""
        levels = {
            field.name: np.array([getattr(level, field.name) for level in self.load], dtype=np.float64)
            for field in fields(LoadLevel)
        }
        demand = Demand(
            **levels,
            peak_live_tokens=self.peak_live_tokens,
            num_steps=self.num_steps,
        )
        prediction = predict(
            demand,
            prefill=PrefillWork(
                tokens=self.computed_prompt_tokens,
                pairs=self.prompt_pairs,
                found=self.prompt_tokens - self.computed_prompt_tokens,
            ),
            rates=rates,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )
        return replace(self, prediction=prediction)

    def to_text(self) -> str:
        """The explanation for a person at a terminal."""
        parts = [_prompts(self), _sharing(self), _memory(self)]
        if self.prediction is not None:
            parts.append(_time(self, self.prediction))
        if self.advice:
            parts.append(["advice", *(f"  - {remark}" for remark in self.advice)])
        return "\n\n".join("\n".join(part) for part in parts)


def _prompts(explanation: Explanation) -> list[str]:
    lines = [
        "prompts",
        f"  rows             {explanation.num_rows:,}",
        f"  samples          {explanation.num_prompts:,}",
        f"  prompt tokens    {explanation.prompt_tokens:,}",
        f"  may generate     {explanation.decode_tokens:,} tokens",
    ]
    if explanation.expected_decode_tokens != explanation.decode_tokens:
        lines.append(
            f"  expected         {explanation.expected_decode_tokens:,} tokens, going by the last run or the labels"
        )
    lines.append(
        f"  at once          {explanation.max_sequences:,}"
        + (", the longest first: so all end together, lengths being certain" if explanation.ends_together else "")
    )
    most = max((bar.num_prompts for bar in explanation.histogram), default=0)
    for bar in explanation.histogram:
        drawn = "#" * -(-bar.num_prompts * BAR_CHARACTERS // most)
        lines.append(f"  {bar.low:>9,} - {bar.high:<9,} {bar.num_prompts:>11,}  {drawn}".rstrip())
    return lines


def _sharing(explanation: Explanation) -> list[str]:
    lines = [
        "sharing",
        f"  must be computed {explanation.unique_prompt_tokens:,} prompt tokens if every shared run is computed once",
        f"  reuse ceiling    {explanation.reuse_ceiling:.2%} of the prompt tokens",
        f"  to compute       {explanation.computed_prompt_tokens:,} prompt tokens, the last of each prompt included",
        f"  shared runs      {explanation.num_nodes:,}",
    ]
    for run in explanation.biggest_nodes:
        depth = f"tokens {run.start:,} to {run.end:,}"
        lines.append(
            f"  {run.tokens_saved:>13,} saved  {run.num_prompts:>9,} prompts  {depth:<22}  {_one_line(run.text)}"
        )
    return lines


def _memory(explanation: Explanation) -> list[str]:
    lines = [
        "keys and values",
        f"  per token        {explanation.kv_bytes_per_token:,} bytes",
        f"  per row          {_size(explanation.kv_bytes_per_row_mean)} mean, "
        f"{_size(explanation.kv_bytes_per_row_most)} most",
        f"  peak demand      {_size(explanation.peak_kv_bytes)} ({explanation.peak_live_tokens:,} tokens)",
    ]
    tiers = explanation.prediction.tiers if explanation.prediction is not None else ()
    for tier in tiers:
        lines.append(f"  {tier.name:<16} {_size(tier.demand_bytes)} of {_size(tier.capacity_bytes)}")
    if tiers and tiers[-1].missing_bytes:
        lines.append(f"  fits nowhere     {_size(tiers[-1].missing_bytes)}: sequences will wait")
    return lines


def _time(explanation: Explanation, prediction: Prediction) -> list[str]:
    return [
        "predicted time",
        f"  prefill          {prediction.prefill_s:,.1f} s",
        f"  decode           {prediction.decode_s:,.1f} s in {explanation.num_steps:,} steps",
        f"  attention        {prediction.attention_s:,.1f} s reading keys and values while decoding",
        f"  fresh memory     {prediction.first_write_s:,.1f} s finding it for generated keys and values",
        f"  tier traffic     {prediction.transfer_s:,.1f} s",
        f"  total            {prediction.total_s:,.1f} s",
        f"  bottleneck       {prediction.bottleneck}",
    ]


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def _one_line(text: str) -> str:
    """Text from data, fit for one terminal line: control characters and line breaks become spaces."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return repr(line if len(line) <= TEXT_CHARACTERS else line[: TEXT_CHARACTERS - 1] + "…")
