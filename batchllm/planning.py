"""`batchllm plan`: a job explained before it runs, without its weights.

Nothing is locked and nothing is written into the output folder; rows are staged in a temporary folder that is removed.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from batchllm.data.inputs import Input, open_input
from batchllm.data.prompts import RowError, Staging, stage_prompts
from batchllm.data.rendering import History
from batchllm.data.reordering import reorderings
from batchllm.data.token_ids import check_token_ids
from batchllm.engine.grammar_tokens import grammar_tokens
from batchllm.engine.measure import StepLoad, measure_rates
from batchllm.engine.pool import KvShape
from batchllm.engine.rehearsal import Form
from batchllm.engine.sizing import engine_width, most_blocks, size_engine
from batchllm.engine.tier_setup import disk_slots, host_slots
from batchllm.errors import JobError
from batchllm.job import Job
from batchllm.models.config import ModelConfig
from batchllm.models.decoder import dtype_for, int8_parts_for, kv_dtype_for
from batchllm.models.registry import resolve_model
from batchllm.models.source import ModelSource, read_config
from batchllm.models.tokenizer import Tokenizer, load_tokenizer
from batchllm.ops import select_kernels
from batchllm.planner.advice import PlanFacts, PlanTotals, advise, reordered_saving, totals
from batchllm.planner.cost import TierSpace
from batchllm.planner.demand import simulate_demand
from batchllm.planner.explanation import Explanation
from batchllm.planner.plan import Plan, make_plan
from batchllm.planner.rates import ObservedRates
from batchllm.planning_stages import AssumedCompletions, StagedPlan, num_restorable
from batchllm.run_record import EngineFacts, device_for, dtype_name, existing_folder, expected_tokens, last_rates
from batchllm.run_stages import RunStages, Stage
from batchllm.storage.cost import measure_copy, measure_disk
from batchllm.storage.errors import StorageError
from batchllm.storage.store_file import KeptFile

ADVICE_ROWS = 4000
"""Rows that are rendered again for each other order of the template."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job explained. `num_error_rows` cannot become prompts; `rates_from` says where predicted times come from."""

    explanation: Explanation
    num_error_rows: int
    rates_from: str

    @property
    def predicted_total_s(self) -> float:
        assert self.explanation.prediction is not None
        return self.explanation.prediction.total_s

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return self.explanation.to_json() | {"num_error_rows": self.num_error_rows, "rates_from": self.rates_from}

    def to_text(self) -> str:
        """For a person at a terminal."""
        lines = [self.explanation.to_text(), f"times from {self.rates_from}"]
        if self.num_error_rows:
            lines.append(
                "1 row cannot become a prompt and will be an error row"
                if self.num_error_rows == 1
                else f"{self.num_error_rows:,} rows cannot become prompts and will be error rows"
            )
        return "\n\n".join(lines)


def plan_job(
    job: Job, *, limit: int | None = None, note: Callable[[str], None] = lambda line: None
) -> JobPlan | StagedPlan:
    """Explains the whole job, also rows that are done. Raises JobError, InputError or ModelError where it could not run."""
    planner = Planner(job, note=note)
    with tempfile.TemporaryDirectory(prefix="batchllm-plan-") as name:
        return planner.explain(Path(name), limit=limit)


class Planner:
    """The model of a job as a plan needs it: where it lies, its shape, and what steps with it cost."""

    def __init__(self, job: Job, *, note: Callable[[str], None]) -> None:
        self._job = job
        self._note = note
        self._rates: dict[StepLoad, tuple[ObservedRates, str]] = {}
        self._device = device_for(job.engine.device)
        self._dtype = dtype_for(job.engine.dtype, self._device)
        self._source: ModelSource = resolve_model(job.model, base_folder=job.folder, say=note)
        self._config: ModelConfig = read_config(self._source)
        check_token_ids(job, vocab_size=self._config.vocab_size)

    def rates(self, load: StepLoad, *, before: str | None = None) -> tuple[ObservedRates, str]:
        """What steps of up to `load` cost, and where that comes from: the last run on such a machine, else a measurement now."""
        found = self._rates.get(load)
        if found is None:
            found = self._rates[load] = self._find_rates(load, before=before)
        return found

    def _find_rates(self, load: StepLoad, *, before: str | None) -> tuple[ObservedRates, str]:
        weights = self._job.engine.weights
        device, dtype = str(self._device), dtype_name(self._dtype, weights=weights)
        observed = last_rates(self._job, model=self._source.name, device=device, dtype=dtype, before=before)
        if observed is not None:
            return observed, "the rates that an earlier run of this job observed"
        self._note("no earlier run to go by: measuring this machine for the model's shape")
        measured = measure_rates(
            self._config,
            dtype=self._dtype,
            device=self._device,
            load=load,
            int8_parts=int8_parts_for(weights),
            form=self._form(),
        )
        return measured, "a short measurement on this machine, with random weights of the model's shape"

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._source)

    @functools.cached_property
    def _tokens_of_grammars(self) -> llguidance.LLTokenizer:
        return grammar_tokens(self._tokenizer, vocab_size=self._config.vocab_size)

    def _form(self) -> Form | None:
        """What all completions must be. Of a job with stages each has its own, and rates are the job's."""
        grammar = None if self._job.stages else self._job.output.grammar()
        return None if grammar is None else Form(grammar, self._tokenizer, self._tokens_of_grammars)

    def explain(self, folder: Path, *, limit: int | None) -> JobPlan | StagedPlan:
        """Stages the rows in `folder` and explains their plan, stage by stage."""
        rows = open_input(self._job, spool_folder=folder, limit=limit)
        tokenizer = self._tokenizer
        staging = Staging.create(folder, input=rows, done=np.zeros(rows.total_rows, dtype=bool))
        stages = RunStages(self._job, input=rows, staging=staging, folder=folder)
        found: list[tuple[str, tuple[str, ...], JobPlan]] = []
        assumed = AssumedCompletions(tokenizer, max_context=self._config.max_context) if self._job.stages else None
        restorable = 0
        try:
            for number in range(len(stages.jobs)):
                stage = stages.open(number, tokenizer)
                plan, job_plan = self._explain_stage(stage, tokenizer, folder)
                remarks, job_plan = self._with_reuse(stage, job_plan, restorable=restorable)
                found.append((stage.name or "", remarks, job_plan))
                if assumed is not None and not stage.is_last:
                    restorable = num_restorable(
                        prompt_tokens=plan.unique_prompt_tokens,
                        completion_tokens=assumed.fill(stage),
                        num_rows=plan.num_prompts,
                        block_size=self._job.engine.block_size,
                    )
            return StagedPlan(tuple(found)) if self._job.stages else found[0][-1]
        finally:
            stages.close()

    def _explain_stage(self, stage: Stage, tokenizer: Tokenizer, folder: Path) -> tuple[Plan, JobPlan]:
        num_error_rows = sum(1 for _ in self._stage(stage.job, stage.input, tokenizer, stage.staging, stage.history))
        plan = self._plan(stage.staging)
        facts = self._engine_facts(plan)
        load = StepLoad(
            max_sequences=facts.config.max_sequences,
            max_tokens=facts.config.max_step_tokens,
            held_tokens=simulate_demand(plan, **asdict(facts.limits)).peak_live_tokens,
        )
        rates, rates_from = self.rates(load)
        explanation = facts.explain(
            plan,
            stage.staging.store,
            decode_text=tokenizer.decode,
            expected=expected_tokens(
                stage.job, rates, stage=stage.name, tokenizer=tokenizer, grammar_tokens=lambda: self._tokens_of_grammars
            ),
        )
        explanation = explanation.with_rates(rates.with_tiers(self._tiers(plan, facts)))
        advice = self._advice(plan, explanation, facts)
        if stage.history is None:
            advice = (*advice, *self._reordering_advice(stage.job, plan, stage.input, tokenizer, folder))
        return plan, JobPlan(replace(explanation, advice=advice), num_error_rows, rates_from)

    def _with_reuse(self, stage: Stage, plan: JobPlan, *, restorable: int) -> tuple[tuple[str, ...], JobPlan]:
        """What is assumed of a later stage, and its plan with what it need not compute, where tiers keep that."""
        if stage.history is None:
            return (), plan
        earlier = " and ".join(stage.history.names)
        remarks = [
            f"assumed: completions of {earlier} as long as they may be (max_tokens, or the longest label); no longer"
        ]
        explanation = plan.explanation
        restorable = min(restorable, explanation.computed_prompt_tokens - explanation.num_prompts)
        if not stage.job.prompt.continues or restorable <= 0:
            return tuple(remarks), plan
        kv = self._job.engine.kv
        if kv.policy == "recompute" or (kv.host == 0 and kv.disk is None):
            remarks.append(
                f"about {restorable:,} of the tokens to compute were computed in stage {stage.history.names[-1]}: "
                "tiers would keep them, see engine.kv.host"
            )
            return tuple(remarks), plan
        remarks.append(f"about {restorable:,} tokens come back from the tiers, and are not among those to compute")
        assert explanation.prediction is not None
        computed = explanation.computed_prompt_tokens
        prefill_s = explanation.prediction.prefill_s * (computed - restorable) / computed
        explanation = replace(
            explanation,
            computed_prompt_tokens=computed - restorable,
            prediction=replace(explanation.prediction, prefill_s=prefill_s),
        )
        return tuple(remarks), replace(plan, explanation=explanation)

    def _stage(
        self, job: Job, rows: Input, tokenizer: Tokenizer, staging: Staging, history: History | None = None
    ) -> Iterator[RowError]:
        return stage_prompts(
            job,
            input=rows,
            tokenizer=tokenizer,
            staging=staging,
            max_context=self._config.max_context,
            vocab_size=self._config.vocab_size,
            history=history,
        )

    def _plan(self, staging: Staging) -> Plan:
        return make_plan(
            staging.store,
            prefix_sharing=self._job.engine.prefix_sharing,
            keep_order=self._job.engine.order == "input",
            max_model_tokens=self._config.max_context,
            engine=engine_width(
                self._device,
                max_step_tokens=self._job.engine.max_step_tokens,
                max_sequences=self._job.engine.max_sequences,
            ),
        )

    def _engine_facts(self, plan: Plan) -> EngineFacts:
        config, settings = self._config, self._job.engine
        kernels = select_kernels(self._device, head_dim=config.head_dim)
        kv_dtype = kv_dtype_for(settings.kv.dtype, dtype=self._dtype, kernels=kernels)
        shape = KvShape.of(config, kv_dtype)
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
            speculation=settings.speculation,
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
            # Whether a kept file is there already only the run finds out.
            kept = KeptFile(0, 0) if kv.persist else None
            num_slots = disk_slots(kv.disk.size, folder=folder, block_bytes=block_bytes, most_blocks=most, kept=kept)
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
                demand=simulate_demand(plan, **asdict(facts.limits)),
                prediction=explanation.prediction,
                context_tokens=facts.max_context,
                max_sequences=facts.config.max_sequences,
            )
        )

    def _reordering_advice(self, job: Job, plan: Plan, rows: Input, tokenizer: Tokenizer, folder: Path) -> list[str]:
        """The other order of the template that saves most, if it saves enough: really rendered, tokenised and planned."""
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
