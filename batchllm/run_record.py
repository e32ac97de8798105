"""What a run writes into its run folder: the job, versions, the plan's promises and the rates it observed."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import torch

from batchllm.data.run_files import TIER_COLUMNS
from batchllm.data.run_folder import RecordedRun, runs_of_job
from batchllm.engine.engine import Engine, EngineConfig
from batchllm.engine.grammar_tokens import num_sampled
from batchllm.engine.pool import KvShape
from batchllm.errors import FolderError, JobError
from batchllm.job import Job
from batchllm.kernels import attention
from batchllm.models.tokenizer import Tokenizer
from batchllm.planner.explain import EngineLimits, ModelFacts, explain
from batchllm.planner.explanation import Explanation
from batchllm.planner.plan import Plan
from batchllm.planner.rates import EXPECT_ALL, Expected, ObservedRates, fit_steps, observed_rates
from batchllm.planner.store import PromptStore
from batchllm.prompt import Completion
from batchllm.storage.tier import TierCounters

_TIER_INTERVAL_S = 1.0


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there. Raises FolderError where that is a file."""
    folder = folder.absolute()
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise FolderError(f"{folder}: is a file, and a folder is wanted there")
    return folder


def device_for(name: str) -> torch.device:
    """The device that a job's `engine.device` names. Raises JobError where it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise JobError("engine.device: cuda is asked for, but torch finds no CUDA device; use auto or cpu")
    return torch.device(name)


def dtype_name(dtype: torch.dtype, *, weights: str) -> str:
    """`float32`, `bfloat16`, `bfloat16 (int8 weights)`: as the summary names it. `weights` is the job's."""
    return str(dtype).removeprefix("torch.") + ("" if weights == "auto" else f" ({weights} weights)")


def device_versions(device: torch.device) -> dict[str, Any]:
    """What ran it on which device, beside `batchllm.run_versions`."""
    on_gpu = device.type == "cuda"
    return {
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
    }


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine is built from, as far as a plan must know."""

    shape: KvShape
    config: EngineConfig
    max_context: int

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes(self.config.block_size)

    @property
    def limits(self) -> EngineLimits:
        config = self.config
        return EngineLimits(
            max_sequences=config.max_sequences, step_tokens=config.max_step_tokens, read_chunk=attention.CHUNK
        )

    def explain(
        self,
        plan: Plan,
        store: PromptStore,
        *,
        decode_text: Callable[[Sequence[int]], str],
        expected: Expected = EXPECT_ALL,
    ) -> Explanation:
        """The plan explained for this engine, without times."""
        return explain(
            plan,
            store,
            model=ModelFacts(
                num_layers=self.shape.num_layers,
                num_kv_heads=self.shape.num_kv_heads,
                head_dim=self.shape.head_dim,
                kv_dtype_bytes=self.shape.dtype.itemsize,
                context_tokens=self.max_context,
            ),
            limits=self.limits,
            rates=None,
            decode_text=decode_text,
            expected=expected,
        )

    def plan_record(self, explanation: Explanation, *, stage: str | None, first_step: int) -> dict[str, Any]:
        """A plan as `plan.json` holds it: the explanation, the engine it was made for, and which step of the run was its first."""
        engine = asdict(self.config) | {"block_bytes": self.block_bytes}
        return {"stage": stage, "explanation": explanation.to_json(), "engine": engine, "first_step": first_step}


class TierUse:
    """What each tier holds over time, for `tiers.parquet`; one moment a second at most."""

    def __init__(self, *, block_bytes: int, started_at: float) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in TIER_COLUMNS if name != "run_id"}
        self._block_bytes = block_bytes
        self._started_at = started_at
        self._next_at = 0.0

    def sample(self, engine: Engine) -> None:
        """Notes the device and every tier under it, if a second has gone by and there is a tier."""
        now = time.monotonic()
        if engine.mover is None or now < self._next_at:
            return
        self._next_at = now + _TIER_INTERVAL_S
        pool, store = engine.scheduler.pool, engine.mover.store
        self._add(now, "device", held=pool.num_used, slots=pool.num_blocks, counters=None)
        for name, tier in (("host", store.host), ("disk", store.disk)):
            if tier is not None and tier.num_slots:
                held = tier.num_slots - tier.num_free
                self._add(now, name, held=held, slots=tier.num_slots, counters=tier.counters)

    def _add(self, now: float, tier: str, *, held: int, slots: int, counters: TierCounters | None) -> None:
        values = {
            "start_s": now - self._started_at,
            "tier": tier,
            "used_bytes": held * self._block_bytes,
            "capacity_bytes": slots * self._block_bytes,
            "read_bytes": counters.bytes_out if counters is not None else 0,
            "written_bytes": counters.bytes_in if counters is not None else 0,
        }
        for name, column in self.columns.items():
            column.append(values[name])


class StageCounts:
    """Counts how much of what they were allowed the finished rows of a stage generated, and how much of it a grammar forced."""

    def __init__(self, store: PromptStore, *, max_context: int) -> None:
        self.generated_tokens = 0
        self.allowed_tokens = 0
        self.forced_tokens = 0
        """Of all rows; the stage's engine tells it at its end."""
        self._store = store
        self._max_context = max_context

    def add(self, completion: Completion) -> None:
        """Takes in a finished sample; error rows say nothing."""
        if completion.error is not None:
            return
        place = self._store.first_of_row(completion.row_index)
        max_tokens = self._store.sampling[int(self._store.sampling_id[place])].max_tokens
        self.allowed_tokens += max(1, min(max_tokens, self._max_context - completion.prompt_tokens))
        self.generated_tokens += len(completion.token_ids)


def expected_tokens(
    job: Job,
    rates: ObservedRates | None,
    *,
    stage: str | None,
    tokenizer: Tokenizer,
    grammar_tokens: Callable[[], llguidance.LLTokenizer],
) -> Expected:
    """What the rows of a stage are expected to generate of what they may: what a run showed, or what the job says.

    Before a run all of it, but where a completion is one of a few labels, as many tokens as the longest of these has, and as many of them
    sampled as in the label that leaves most open.
    """
    expected = rates.expected_of(stage) if rates is not None else None
    labels, most, grammar = job.output.choice, job.sampling.max_tokens, job.output.grammar()
    if expected is not None or not isinstance(labels, tuple) or not isinstance(most, int) or grammar is None:
        return expected or EXPECT_ALL
    texts = [ids.tolist() for ids in tokenizer.encode_batch(list(labels), allow_special=False)]
    longest = max(map(len, texts))
    sampled = max(num_sampled(grammar, texts, tokens=grammar_tokens()))
    return Expected(generated_share=min(1.0, longest / most), sampled_share=sampled / longest)


def rates_record(
    steps: Mapping[str, Any], *, facts: EngineFacts, counts: Sequence[tuple[str | None, StageCounts]]
) -> dict[str, Any] | None:
    """What `rates.json` holds; None where the run was too short to tell. `counts`: of each stage by its name."""
    costs = fit_steps(steps)
    if costs is None:
        return None
    rates = observed_rates(
        costs,
        kv_bytes_per_token=facts.shape.bytes_per_token,
        # An accepted draft is a row of a sequence that has one already.
        most_sequences=int((np.asarray(steps["num_decode_rows"]) - np.asarray(steps["num_accepted"])).max()),
        expected=_expected([stage for _, stage in counts]),
    )
    by_stage = tuple((name, _expected([stage])) for name, stage in counts if name is not None)
    return replace(rates, stages=by_stage).to_json()


def _expected(counts: Sequence[StageCounts]) -> Expected:
    """What these rows did."""
    generated, allowed, forced = (
        sum(getattr(stage, name) for stage in counts)
        for name in ("generated_tokens", "allowed_tokens", "forced_tokens")
    )
    return Expected(
        generated_share=min(generated / allowed, 1.0) if allowed else 1.0,
        sampled_share=max(generated - forced, 0) / generated if generated else 1.0,
    )


def last_rates(job: Job, *, model: str, device: str, dtype: str, before: str | None = None) -> ObservedRates | None:
    """What the last run of this job on such a machine observed; `before`: of those that are older than this run."""
    for run in reversed(runs_of_job(Path(job.output.path), name=job.name)):
        summary = run.summary
        is_alike = (summary.get("model"), summary.get("device"), summary.get("dtype")) == (model, device, dtype)
        if run.rates is None or not is_alike or (before is not None and run.run_id >= before):
            continue
        rates = _read_rates(run)
        if rates is not None:
            return rates
    return None


def _read_rates(run: RecordedRun) -> ObservedRates | None:
    """None for a file that another version wrote."""
    try:
        return ObservedRates.from_json(run.rates or {})
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None
