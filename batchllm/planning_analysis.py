"""`batchllm plan --analyze`: a run compared with what was predicted for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm.data.run_folder import RecordedRun, recorded_runs
from batchllm.engine.measure import StepLoad
from batchllm.errors import JobError
from batchllm.job import Job
from batchllm.planner.analyze import Actual, Comparison, add_up, compare_with_actual, comparison_text
from batchllm.planner.cost import TierSpace
from batchllm.planner.explanation import Explanation
from batchllm.planner.rates import fit_steps
from batchllm.planning import Planner

_STEP_COLUMNS = [
    "seconds",
    "num_prefill_rows",
    "num_decode_rows",
    "num_kv_tokens_read",
    "num_kv_tokens_spared",
    "num_used_blocks",
]


_ENGINE_SIZES = ("max_sequences", "max_step_tokens", "num_blocks", "block_size", "block_bytes")


@dataclass(frozen=True, slots=True)
class RunAnalysis:
    """The last run beside its plan. `stages`: each stage by its name, in a job that has stages, whose plans were made one after the other."""

    run_id: str
    status: str
    rates_from: str
    comparisons: tuple[Comparison, ...]
    stages: tuple[tuple[str, tuple[Comparison, ...]], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values; `stages` where the job has some."""
        values: dict[str, Any] = {"run_id": self.run_id, "status": self.status, "rates_from": self.rates_from}
        values["comparisons"] = _comparison_rows(self.comparisons)
        if self.stages:
            values["stages"] = [{"name": name, "comparisons": _comparison_rows(rows)} for name, rows in self.stages]
        return values

    def to_text(self) -> str:
        """For a person at a terminal."""
        lines = [f"run {self.run_id}, {self.status}"]
        lines += [f"stage {name}\n{comparison_text(rows)}" for name, rows in self.stages]
        lines.append(("all stages\n" if self.stages else "") + comparison_text(self.comparisons))
        lines.append(f"times from {self.rates_from}")
        if self.status != "finished":
            lines.append("the run did not come to its end, its plan covers all its rows")
        return "\n\n".join(lines)


def analyze_last_run(job: Job, *, note: Callable[[str], None] = lambda line: None) -> RunAnalysis:
    """The last run in the job's output folder that took steps, beside what its plan predicted. Raises JobError where there is none."""
    runs = [run for run in recorded_runs(Path(job.output.path)) if run.steps is not None and run.plan is not None]
    if not runs:
        raise JobError(f"{job.output.path}: records no run that took a step; run the job first, or give its --date")
    run = runs[-1]
    planner = Planner(job, note=note)
    plans = _recorded_plans(run)
    load = StepLoad(
        max_sequences=plans[0].max_sequences,
        max_tokens=plans[0].max_step_tokens,
        held_tokens=plans[0].explanation.peak_live_tokens,
    )
    rates, rates_from = planner.rates(load, before=run.run_id)
    steps = _recorded_steps(run)
    ends = [plan.first_step for plan in plans[1:]] + [len(steps["seconds"])]
    found = [
        compare_with_actual(
            plan.explanation.with_rates(rates.with_tiers((plan.device,))),
            _actual({name: column[plan.first_step : end] for name, column in steps.items()}, plan),
        )
        for plan, end in zip(plans, ends, strict=True)
    ]
    return RunAnalysis(
        run_id=run.run_id,
        status=str(run.summary["status"]),
        rates_from=rates_from,
        comparisons=add_up(found),
        stages=tuple((plan.stage, rows) for plan, rows in zip(plans, found, strict=True) if plan.stage is not None),
    )


def _comparison_rows(comparisons: tuple[Comparison, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"ratio": row.ratio} for row in comparisons]


@dataclass(frozen=True, slots=True)
class _RecordedPlan:
    """One plan of a run: of the stage `stage`, whose steps begin at `first_step`, or of a job without stages."""

    stage: str | None
    explanation: Explanation
    max_sequences: int
    max_step_tokens: int
    num_blocks: int
    block_size: int
    block_bytes: int
    first_step: int
    completion_tokens: int

    @property
    def device(self) -> TierSpace:
        return TierSpace("device", capacity_bytes=self.num_blocks * self.block_bytes, bytes_per_s=float("inf"))


def _recorded_plans(run: RecordedRun) -> list[_RecordedPlan]:
    plan = run.plan or {}
    try:
        return [
            _RecordedPlan(
                stage=part.get("stage"),
                explanation=Explanation.from_json(part["explanation"]),
                first_step=int(part["first_step"]),
                completion_tokens=int(part["completion_tokens"]),
                **{name: int(part["engine"][name]) for name in _ENGINE_SIZES},
            )
            for part in plan["plans"]
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise JobError(f"{run.path}/plan.json: another version of this program wrote it; run the job again") from None


def _recorded_steps(run: RecordedRun) -> dict[str, np.ndarray]:
    """The columns of the step log that a comparison needs."""
    assert run.steps is not None
    try:
        table = pq.read_table(run.steps, columns=_STEP_COLUMNS)
    except (OSError, pa.ArrowException) as error:
        raise JobError(f"{run.steps}: cannot be read: {str(error).splitlines()[0]}") from None
    return {name: table.column(name).to_numpy() for name in _STEP_COLUMNS}


def _actual(steps: dict[str, np.ndarray], plan: _RecordedPlan) -> Actual:
    """What these steps measured. A step that prefills and decodes is split by the costs that fit the log best."""
    total_s = float(steps["seconds"].sum())
    costs = fit_steps(steps)
    num_prefill = int(steps["num_prefill_rows"].sum())
    only_prefill = steps["num_decode_rows"] == 0
    # A log too short for a fit still tells steps that only prefill from the rest.
    prefill_s = costs.prefill_row * num_prefill if costs is not None else float(steps["seconds"][only_prefill].sum())
    return Actual(
        computed_prompt_tokens=num_prefill,
        decode_tokens=plan.completion_tokens,
        num_steps=len(steps["seconds"]),
        peak_live_tokens=int(steps["num_used_blocks"].max(initial=0)) * plan.block_size,
        prefill_s=min(prefill_s, total_s),
        decode_s=max(total_s - prefill_s, 0.0),
        total_s=total_s,
    )
