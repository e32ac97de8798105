"""What a run did, counted as it goes: totals for the summary, and one row a step for whoever asks later why it was slow."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

STEP_COLUMNS = {
    "start_s": "d",
    "seconds": "d",
    "model_seconds": "d",
    "num_decode_rows": "l",
    "num_prefill_rows": "l",
    "num_running": "l",
    "num_waiting": "l",
    "num_used_blocks": "l",
    "num_kv_tokens_read": "l",
    "num_kv_tokens_spared": "l",
    "num_preempted": "l",
    "num_drafted": "l",
    "num_accepted": "l",
}
"""Columns of the step log and their array type codes. Seconds from the start of the run; blocks of the device pool.

`num_kv_tokens_read`: tokens whose keys and values the decoding rows read, what neighbours read together once; `num_kv_tokens_spared`: what
reading together spared. `num_decode_rows` counts rows that gave a token that counts, of which `num_accepted` had been drafted; `num_drafted` rows were.
"""


class StepLog:
    """One row a step, as compact columns: a million steps are about 100 MB."""

    def __init__(self) -> None:
        self.columns: dict[str, array] = {name: array(code) for name, code in STEP_COLUMNS.items()}

    def append(self, values: Mapping[str, float | int]) -> None:
        """One step; `values` has every column."""
        for name, column in self.columns.items():
            column.append(values[name])

    def __len__(self) -> int:
        return len(self.columns["start_s"])


@dataclass(slots=True)
class RunMetrics:
    """Totals of one run of the engine.

    `prompt_tokens` of sequences admitted so far, of which `cached_prompt_tokens` were not computed for them.
    `generated_tokens` so far, of which `completion_tokens` belong to finished rows, and `forced_tokens` were not sampled.
    `computed_prompt_tokens` counts every prefill row, work repeated after a preemption (`recomputed_tokens`) included.
    `drafted_tokens` were guessed, and `accepted_tokens` of them were what the model says. `restored_tokens` came back from a tier.
    `num_unfilled_slots` of `num_allocated_slots` token slots were given back without ever holding a token.
    `schedule_s`, `model_s` and `sample_s` are the parts of the steps; the device may still compute while the host samples.
    """

    num_steps: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    num_completed: int = 0
    num_errors: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    restored_tokens: int = 0
    num_allocated_slots: int = 0
    num_unfilled_slots: int = 0
    peak_used_blocks: int = 0
    num_blocks: int = 0
    model_s: float = 0.0
    schedule_s: float = 0.0
    sample_s: float = 0.0
    wall_s: float = 0.0
    step_log: StepLog = field(default_factory=StepLog)

    def plus(self, other: RunMetrics) -> RunMetrics:
        """The totals of both, one after the other: sums, of the wall clock the larger, and the pool of the one that filled its own more."""
        total = RunMetrics()
        for item in fields(self):
            ours, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name != "step_log":
                setattr(total, item.name, max(ours, theirs) if item.name == "wall_s" else ours + theirs)
        fuller = max(self, other, key=lambda metrics: metrics.peak_used_blocks / max(metrics.num_blocks, 1))
        total.peak_used_blocks, total.num_blocks = fuller.peak_used_blocks, fuller.num_blocks
        for name, column in total.step_log.columns.items():
            column.extend(self.step_log.columns[name])
            column.extend(other.step_log.columns[name])
        return total


@dataclass(slots=True)
class TransferCounters:
    """Of one run. `stall_s`: time in which the engine waited for a transfer and computed nothing."""

    num_saved: int = 0
    num_not_worth: int = 0
    num_loads: int = 0
    num_load_misses: int = 0
    stall_s: float = 0.0
