"""`batchllm plan`: a job explained before it runs, without its weights, and a run compared with what was predicted for it.

Nothing is locked and nothing is written into the output folder; rows are staged in a temporary folder that is removed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm.data.inputs import Input, open_input
from batchllm.data.prompts import Staging, stage_prompts
from batchllm.data.reordering import reorderings
from batchllm.data.run_folder import RecordedRun, recorded_runs
from batchllm.engine.measure import measure_rates
from batchllm.engine.pool import KvShape
from batchllm.engine.sizing import most_blocks, size_engine
from batchllm.engine.tier_setup import disk_slots, host_slots
from batchllm.errors import JobError
from batchllm.job import Job
from batchllm.models.config import ModelConfig
from batchllm.models.decoder import dtype_for, kv_dtype_for
from batchllm.models.registry import resolve_model
from batchllm.models.source import ModelSource, read_config
from batchllm.models.tokenizer import Tokenizer, load_tokenizer
from batchllm.ops import select_kernels
from batchllm.plan.advice import PlanFacts, PlanTotals, advise, reordered_saving, totals
from batchllm.plan.analyze import Actual, Comparison, compare_with_actual, comparison_text
from batchllm.plan.cost import TierSpace
from batchllm.plan.demand import simulate_demand
from batchllm.plan.explanation import Explanation
from batchllm.plan.plan import Plan, make_plan
from batchllm.plan.rates import ObservedRates, fit_steps
from batchllm.run_record import EngineFacts, device_for, dtype_name, existing_folder, last_rates
from batchllm.storage.cost import measure_copy, measure_disk
from batchllm.storage.errors import StorageError

ADVICE_ROWS = 4000
"""Rows that are rendered again for each other order of the template."""

_STEP_COLUMNS = ["seconds", "num_prefill_rows", "num_decode_rows", "num_used_blocks"]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job explained. `num_error_rows` cannot become prompts; `rates_from` says where predicted times come from."""

    explanation: Explanation
    num_error_rows: int
    rates_from: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return self.explanation.to_json() | {"num_error_rows": self.num_error_rows, "rates_from": self.rates_from}

    def to_text(self) -> str:
        """For a person at a terminal."""
        lines = [self.explanation.to_text(), f"times from {self.rates_from}"]
        if self.num_error_rows:
            lines.append(f"{self.num_error_rows:,} rows cannot become prompts and will be error rows")
        return "\n\n".join(lines)


@dataclass(frozen=True, slots=True)
class RunAnalysis:
    """The last run beside its plan."""

    run_id: str
    status: str
    rates_from: str
    comparisons: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [asdict(row) | {"ratio": row.ratio} for row in self.comparisons]
        return {"run_id": self.run_id, "status": self.status, "rates_from": self.rates_from, "comparisons": rows}

    def to_text(self) -> str:
        """For a person at a terminal."""
        lines = [
            f"run {self.run_id}, {self.status}",
            comparison_text(self.comparisons),
            f"times from {self.rates_from}",
        ]
        if self.status != "finished":
            lines.append("the run did not come to its end, its plan covers all its rows")
        return "\n\n".join(lines)


def plan_job(job: Job, *, limit: int | None = None, note: Callable[[str], None] = lambda line: None) -> JobPlan:
    """Explains the whole job, also rows that are done. Raises JobError, InputError or ModelError where it could not run."""
    planner = _Planner(job, note=note)
    with tempfile.TemporaryDirectory(prefix="batchllm-plan-") as name:
        return planner.explain(Path(name), limit=limit)


def analyze_last_run(job: Job, *, note: Callable[[str], None] = lambda line: None) -> RunAnalysis:
    """The last run in the job's output folder that took steps, beside what its plan predicted. Raises JobError where there is none."""
    runs = [run for run in recorded_runs(Path(job.output.path)) if run.steps is not None and run.plan is not None]
    if not runs:
        raise JobError(f"{job.output.path}: records no run that took a step; run the job first, or give its --date")
    run = runs[-1]
    planner = _Planner(job, note=note)
    explanation, engine = _recorded_plan(run)
    rates, rates_from = planner.rates(max_sequences=engine["max_sequences"], before=run.run_id)
    explanation = explanation.with_rates(rates.with_tiers(()))
    return RunAnalysis(
        run_id=run.run_id,
        status=str(run.summary["status"]),
        rates_from=rates_from,
        comparisons=compare_with_actual(explanation, _actual(run, engine)),
    )


class _Planner:
    """The model of a job as a plan needs it: where it lies, its shape, and what steps with it cost."""

    def __init__(self, job: Job, *, note: Callable[[str], None]) -> None:
        # The prompts of later stages are not known before the first has run.
        self._job = job.stage_jobs()[0]
        self._note = note
        if job.stages:
            note(f"the plan of stage {job.stages[0].name}; later stages are planned when it has run")
        self._device = device_for(job.engine.device)
        self._dtype = dtype_for(job.engine.dtype, self._device)
        self._source: ModelSource = resolve_model(job.model, base_folder=job.folder, say=note)
        self._config: ModelConfig = read_config(self._source)

    def rates(self, *, max_sequences: int, before: str | None = None) -> tuple[ObservedRates, str]:
        """What steps cost, and where that comes from: the last run on such a machine, else a measurement now."""
        device, dtype = str(self._device), dtype_name(self._dtype)
        observed = last_rates(self._job, model=self._source.name, device=device, dtype=dtype, before=before)
        if observed is not None:
            return observed, "the rates that an earlier run of this job observed"
        self._note("no earlier run to go by: measuring this machine for the model's shape")
        measured = measure_rates(self._config, dtype=self._dtype, device=self._device, max_sequences=max_sequences)
        return measured, "a short measurement on this machine, with random weights of the model's shape"

    def explain(self, folder: Path, *, limit: int | None) -> JobPlan:
        """Stages the rows in `folder` and explains their plan."""
        rows = open_input(self._job, spool_folder=folder, limit=limit)
        tokenizer = load_tokenizer(self._source)
        staging = Staging.create(folder, input=rows, done=np.zeros(rows.total_rows, dtype=bool))
        try:
            num_error_rows = sum(1 for _ in self._stage(self._job, rows, tokenizer, staging))
            plan = self._plan(staging)
            facts = self._engine_facts(plan)
            rates, rates_from = self.rates(max_sequences=facts.config.max_sequences)
            explanation = facts.explain(
                plan, staging.store, decode_text=tokenizer.decode, expected_share=rates.generated_share
            )
            explanation = explanation.with_rates(rates.with_tiers(self._tiers(plan, facts)))
            advice = (*self._advice(plan, explanation, facts), *self._reordering_advice(plan, rows, tokenizer, folder))
            return JobPlan(replace(explanation, advice=advice), num_error_rows, rates_from)
        finally:
            staging.close()

    def _stage(self, job: Job, rows: Input, tokenizer: Tokenizer, staging: Staging) -> Any:
        return stage_prompts(
            job, input=rows, tokenizer=tokenizer, staging=staging, max_context=self._config.max_context
        )

    def _plan(self, staging: Staging) -> Plan:
        return make_plan(
            staging.store,
            prefix_sharing=self._job.engine.prefix_sharing,
            keep_order=self._job.engine.order == "input",
            max_model_tokens=self._config.max_context,
        )

    def _engine_facts(self, plan: Plan) -> EngineFacts:
        config, settings = self._config, self._job.engine
        kernels = select_kernels(self._device, head_dim=config.head_dim)
        kv_dtype = kv_dtype_for(settings.kv.dtype, dtype=self._dtype, kernels=kernels)
        shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype)
        sizes = size_engine(
            plan=plan,
            shape=shape,
            device=self._device,
            max_context=config.max_context,
            block_size=settings.block_size,
            max_step_tokens=settings.max_step_tokens,
            max_sequences=settings.max_sequences,
            kv_bytes=settings.kv.device,
            evict_least_recent=settings.kv.policy == "lru",
        )
        return EngineFacts(shape, sizes, config.max_context)

    def _tiers(self, plan: Plan, facts: EngineFacts) -> tuple[TierSpace, ...]:
        """The device, and the tiers that the job asks for with what moving bytes to them costs, measured in about a second."""
        kv, block_bytes = self._job.engine.kv, facts.block_bytes
        # The device holds its blocks in place: no byte moves to them, so its rate is never asked for.
        capacity_bytes = facts.config.num_blocks * block_bytes
        spaces = [TierSpace(name="device", capacity_bytes=capacity_bytes, bytes_per_s=float("inf"))]
        if kv.policy == "recompute":
            return tuple(spaces)
        most = most_blocks(plan, max_context=facts.max_context, block_size=facts.config.block_size)
        num_slots = host_slots(kv.host, block_bytes=block_bytes, most_blocks=most)
        if num_slots:
            rate = measure_copy(block_bytes=block_bytes)
            spaces.append(TierSpace(name="host", capacity_bytes=num_slots * block_bytes, bytes_per_s=rate))
        if kv.disk is not None:
            folder = existing_folder(Path(kv.disk.path))
            num_slots = disk_slots(kv.disk.size, folder=folder, block_bytes=block_bytes, most_blocks=most)
            try:
                rate = min(measure_disk(folder, block_bytes=block_bytes))
            except StorageError as error:
                raise JobError(f"engine.kv.disk: {error}") from None
            if num_slots and rate:
                spaces.append(TierSpace(name="disk", capacity_bytes=num_slots * block_bytes, bytes_per_s=rate))
        return tuple(spaces)

    def _advice(self, plan: Plan, explanation: Explanation, facts: EngineFacts) -> tuple[str, ...]:
        return advise(
            PlanFacts(
                plan=plan,
                demand=simulate_demand(
                    plan, max_sequences=facts.config.max_sequences, step_tokens=facts.config.max_step_tokens
                ),
                prediction=explanation.prediction,
                context_tokens=facts.max_context,
                max_sequences=facts.config.max_sequences,
            )
        )

    def _reordering_advice(self, plan: Plan, rows: Input, tokenizer: Tokenizer, folder: Path) -> list[str]:
        """The other order of the template that saves most, if it saves enough: really rendered, tokenised and planned."""
        job = self._job
        alternatives = reorderings(job.prompt) if job.engine.prefix_sharing else []
        if not alternatives:
            return []
        sample = replace(rows, num_rows=min(rows.num_rows, ADVICE_ROWS))
        is_whole = sample.num_rows == rows.num_rows
        original = totals(plan) if is_whole else self._sample_totals(job, sample, tokenizer, folder / "sample")
        found: list[tuple[int, str]] = []
        for number, alternative in enumerate(alternatives):
            other = job.model_copy(update={"prompt": alternative.prompt})
            counted = self._sample_totals(other, sample, tokenizer, folder / f"sample-{number}")
            remark = reordered_saving(original, counted, change=alternative.change)
            if remark is not None:
                note = "" if is_whole else f", counted on the first {sample.num_rows:,} rows"
                found.append((counted.unique_prompt_tokens, remark + note))
        return [min(found)[1]] if found else []

    def _sample_totals(self, job: Job, sample: Input, tokenizer: Tokenizer, folder: Path) -> PlanTotals:
        folder.mkdir()
        staging = Staging.create(folder, input=sample, done=np.zeros(sample.total_rows, dtype=bool))
        try:
            for _ in self._stage(job, sample, tokenizer, staging):
                pass
            return totals(self._plan(staging))
        finally:
            staging.close()


def _recorded_plan(run: RecordedRun) -> tuple[Explanation, dict[str, Any]]:
    plan = run.plan or {}
    try:
        engine = {name: int(plan["engine"][name]) for name in ("max_sequences", "block_size", "block_bytes")}
        return Explanation.from_json(plan["explanation"]), engine
    except (KeyError, TypeError, ValueError):
        raise JobError(f"{run.path}/plan.json: another version of this program wrote it; run the job again") from None


def _actual(run: RecordedRun, engine: dict[str, Any]) -> Actual:
    """What the run measured. A step that prefills and decodes is split by the costs that fit its log best."""
    assert run.steps is not None
    try:
        table = pq.read_table(run.steps, columns=_STEP_COLUMNS)
    except (OSError, pa.ArrowException) as error:
        raise JobError(f"{run.steps}: cannot be read: {str(error).splitlines()[0]}") from None
    steps = {name: table.column(name).to_numpy() for name in _STEP_COLUMNS}
    total_s = float(steps["seconds"].sum())
    costs = fit_steps(steps, block_bytes=engine["block_bytes"])
    num_prefill = int(steps["num_prefill_rows"].sum())
    only_prefill = steps["num_decode_rows"] == 0
    # A log too short for a fit still tells steps that only prefill from the rest.
    prefill_s = costs.prefill_row * num_prefill if costs is not None else float(steps["seconds"][only_prefill].sum())
    return Actual(
        computed_prompt_tokens=num_prefill,
        decode_tokens=int(run.summary.get("completion_tokens") or 0),
        num_steps=len(table),
        peak_live_tokens=int(steps["num_used_blocks"].max(initial=0)) * engine["block_size"],
        prefill_s=min(prefill_s, total_s),
        decode_s=max(total_s - prefill_s, 0.0),
        total_s=total_s,
    )
