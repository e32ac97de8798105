"""`batchllm simulate`: a job's plan, or a recorded trace, against pools and tiers of other sizes. No weights are loaded."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchllm.bounded_files import read_whole
from batchllm.data.inputs import open_input
from batchllm.data.prompts import Staging, stage_prompts
from batchllm.data.token_ids import check_token_ids
from batchllm.engine.pool import KvShape
from batchllm.engine.sizing import engine_width
from batchllm.errors import InputError, JobError
from batchllm.job import Job, parse_size
from batchllm.models.decoder import dtype_for, kv_dtype_for
from batchllm.models.registry import resolve_model
from batchllm.models.source import read_config
from batchllm.models.tokenizer import load_tokenizer
from batchllm.ops import REFERENCE
from batchllm.planner.plan import make_plan
from batchllm.planner.requests import Requests, read_trace, requests_of_plan
from batchllm.planner.simulate import POLICIES, Replay, Sizes, simulate
from batchllm.storage.cost import CostTable, Rate

_MOST_PERCENT = 10_000
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to replay. `block_bytes`: of the keys and values of one block."""

    name: str
    requests: Requests
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """One replay of `workload` for each policy, all with the same `sizes`."""

    name: str
    num_requests: int
    working_set_blocks: int
    block_bytes: int
    sizes: Sizes
    replays: tuple[Replay, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "num_requests": self.num_requests,
            "working_set_blocks": self.working_set_blocks,
            "block_bytes": self.block_bytes,
            "pool_blocks": self.sizes.pool,
            "host_blocks": self.sizes.host,
            "disk_blocks": self.sizes.disk,
            "max_sequences": self.sizes.max_sequences,
            "policies": [replay.to_json() for replay in self.replays],
        }


def job_workload(job: Job, *, limit: int | None = None, note: Callable[[str], None] = lambda line: None) -> Workload:
    """The job's prompts in the order in which a run takes them. Raises JobError, InputError or ModelError where it could not run."""
    if job.stages:
        raise JobError("stages: a job of stages is not simulated; give a job with the prompt of one of them")
    source = resolve_model(job.model, base_folder=job.folder, say=note)
    config = read_config(source)
    check_token_ids(job, vocab_size=config.vocab_size)
    settings = job.engine
    device = torch.device("cpu" if settings.device == "auto" else settings.device)
    with tempfile.TemporaryDirectory(prefix="batchllm-simulate-") as name:
        folder = Path(name)
        rows = open_input(job, spool_folder=folder, limit=limit)
        done = np.zeros(rows.table.num_rows, dtype=bool)
        staging = Staging.create(folder, input=rows, done=done)
        try:
            tokenizer = load_tokenizer(source)
            errors = stage_prompts(
                job,
                input=rows,
                tokenizer=tokenizer,
                staging=staging,
                max_context=config.max_context,
                vocab_size=config.vocab_size,
            )
            num_errors = sum(1 for _ in errors)
            if num_errors:
                note(f"{num_errors} rows cannot be run and are left out")
            if staging.store.num_prompts == 0:
                raise InputError(f"{job.name}: no row can be run")
            plan = make_plan(
                staging.store,
                prefix_sharing=settings.prefix_sharing,
                keep_order=settings.order == "input",
                max_model_tokens=config.max_context,
                engine=engine_width(
                    device,
                    max_step_tokens=settings.max_step_tokens,
                    max_sequences=settings.max_sequences,
                ),
            )
        finally:
            staging.close()
    dtype = dtype_for(settings.dtype, device)
    # A replay runs no kernel: what the reference can keep, it can count.
    kv_dtype = kv_dtype_for(settings.kv.dtype, dtype=dtype, kernels=REFERENCE)
    shape = KvShape.of(config, kv_dtype)
    requests = requests_of_plan(plan, block_size=settings.block_size)
    return Workload(job.name, requests, shape.block_bytes(settings.block_size))


def trace_workload(path: Path, *, kv_bytes_per_token: int, limit: int | None = None) -> Workload:
    """A Mooncake trace, by its file's name. Raises InputError for a file that is none."""
    requests = read_trace(path, limit=limit)
    return Workload(path.stem, requests, kv_bytes_per_token * requests.block_tokens)


def simulate_workload(
    workload: Workload, *, pool: str, host: str, disk: str, max_sequences: int, rates: dict[Rate, float] | None
) -> Simulation:
    """Replays under every policy. Sizes: bytes as in a job file (`2GiB`), or a share of the working set (`25%`); 0 is none.

    Raises JobError for what is no size.
    """
    requests, block_bytes = workload.requests, workload.block_bytes

    def blocks(option: str, text: str) -> int:
        return size_in_blocks(text, option=option, working_set=requests.working_set, block_bytes=block_bytes)

    sizes = Sizes(
        pool=blocks("--pool", pool),
        host=blocks("--host", host),
        disk=blocks("--disk", disk),
        max_sequences=max_sequences,
    )
    costs = None if rates is None else CostTable(rates)
    replays = tuple(
        simulate(requests, sizes=sizes, policy=policy, block_bytes=block_bytes, costs=costs) for policy in POLICIES
    )
    return Simulation(workload.name, len(requests.requests), requests.working_set, block_bytes, sizes, replays)


def size_in_blocks(text: str, *, option: str, working_set: int, block_bytes: int) -> int:
    """Whole blocks in a size or share. Raises JobError, naming `option`."""
    if text == "0":
        return 0
    share = _SHARE.fullmatch(text.strip())
    if share is not None and float(share[1]) <= _MOST_PERCENT:
        return int(working_set * float(share[1]) / 100)
    try:
        size = parse_size(text)
    except ValueError:
        size = "auto"
    if not isinstance(size, int):
        raise JobError(f"{option} {text}: give a size such as 2GiB, a share of the working set such as 25%, or 0")
    return size // block_bytes


def read_rates(path: Path) -> dict[Rate, float]:
    """Rates of a machine: a JSON object with names of `Rate`. Raises JobError for anything else."""
    try:
        values = json.loads(read_whole(path).decode())
        rates = {Rate(name): float(value) for name, value in values.items()}
    except OSError as error:
        raise JobError(f"--rates {path}: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        known = ", ".join(rate.value for rate in Rate)
        raise JobError(f"--rates {path}: {error}; needs a JSON object with rates above 0, of {known}") from None
    if not all(0 < rate < math.inf for rate in rates.values()):
        raise JobError(f"--rates {path}: rates are finite numbers above 0")
    return rates
