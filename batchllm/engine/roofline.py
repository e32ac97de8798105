"""What a run reached of what this machine can do: the machine measured, a run's facts, and both put together (`planner/roofline`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from batchllm.engine.metrics import RunMetrics
from batchllm.kernels.native.memory import advise_huge_pages
from batchllm.models.decoder import Decoder
from batchllm.ops import Kernels
from batchllm.planner.roofline import MachineLimits, Roofline, RunFacts, roofline
from batchllm.planner.work import PlanWork

SHORTEST_S = 0.5
"""Steps that take less together than measuring the machine say nothing of it."""

_TRY_S = 0.01
"""How long each way to do the same is tried, before the fastest goes on to `_ENOUGH_S`."""
_ENOUGH_S = 0.05
_MOST_REPEATS = 8
_READ_BYTES = 256 << 20
"""More than the caches of most machines hold."""

_measured: dict[tuple[Kernels, torch.dtype, torch.device], MachineLimits] = {}

_WEIGHT_SIZE = 2048
_ROWS_PER_THREAD = 256


def run_roofline(work: PlanWork, *, decoder: Decoder, metrics: RunMetrics, max_step_tokens: int) -> Roofline | None:
    """What a run with `metrics` reached of what `work` asks; None where its steps took too little time to tell.

    Measures the machine once a process, which takes some 0.15 s, and again where the run is found to have reached more than all of it: then
    something slowed the machine when it was measured.
    """
    facts = run_facts(metrics, max_step_tokens=max_step_tokens)
    if facts.steps_s < SHORTEST_S:
        return None
    config = decoder.config

    def reached(*, again: bool) -> Roofline:
        return roofline(
            work,
            model=config,
            weight_bytes=decoder.bytes_per_weight,
            kv_bytes=2 * config.num_kv_heads * config.head_dim * decoder.kv_dtype.itemsize,
            facts=facts,
            limits=measure_limits(decoder.kernels, dtype=decoder.dtype, device=decoder.device, again=again),
        )

    found = reached(again=False)
    return found if found.share <= 1 else reached(again=True)


def run_facts(metrics: RunMetrics, *, max_step_tokens: int) -> RunFacts:
    """The facts of a run that has ended."""
    columns = metrics.step_log.columns
    turns = np.asarray(columns["num_decode_rows"]) - np.asarray(columns["num_accepted"])
    return RunFacts(
        max_step_tokens=max_step_tokens,
        prefill_rows=metrics.computed_prompt_tokens,
        decode_steps=int((turns > 0).sum()),
        decode_turns=int(turns.sum()),
        steps_s=metrics.schedule_s + metrics.model_s + metrics.sample_s,
        forced_tokens=metrics.forced_tokens,
    )


def measure_limits(kernels: Kernels, *, dtype: torch.dtype, device: torch.device, again: bool = False) -> MachineLimits:
    """The best that this process has measured: once, and once more with each `again`. The product is the fastest of the kernels' own, torch's, and
    on a CPU torch's in float32, at a size that suits them.
    """
    key = kernels, dtype, device
    if again or key not in _measured:
        limits = MachineLimits(_product_rate(kernels, dtype, device), _read_rate(device))
        before = _measured.get(key, limits)
        _measured[key] = MachineLimits(
            max(limits.flops_per_s, before.flops_per_s), max(limits.bytes_per_s, before.bytes_per_s)
        )
    return _measured[key]


def _product_rate(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> float:
    size = _WEIGHT_SIZE if device.type == "cpu" else 4 * _WEIGHT_SIZE
    num_rows = min(size, _ROWS_PER_THREAD * max(2, torch.get_num_threads())) if device.type == "cpu" else size
    # Each row is the one above shifted by a number: to draw them all would take longer than the products.
    values = torch.randn(2 * size, generator=torch.Generator().manual_seed(0)).to(device, dtype).unfold(0, size, 1)
    weight, rows = values[:size].contiguous(), values[:num_rows].contiguous()
    packed = kernels.pack_linear(weight)
    ways: list[Callable[[], object]] = [
        lambda: kernels.linear(rows, packed),
        lambda: torch.nn.functional.linear(rows, weight),
    ]
    if device.type == "cpu" and dtype.itemsize < torch.float32.itemsize:
        # Where a processor has no products of this type, those of float32 are several times as fast.
        wide_rows, wide_weight = rows.float(), weight.float()
        ways.append(lambda: torch.nn.functional.linear(wide_rows, wide_weight))
    return 2.0 * num_rows * size * size / _best_s(ways, device)


def _read_rate(device: torch.device) -> float:
    values = torch.empty(_READ_BYTES // 4, device=device)
    # As weights and block pools lie: a read of small pages is a third slower here.
    advise_huge_pages(values)
    # Memory that was never written is one page of zeros, which a cache holds.
    values.fill_(1.0)
    return values.nbytes / _best_s([values.sum, lambda: torch.linalg.vector_norm(values)], device)


def _best_s(ways: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The shortest of a few passes of any of `ways`: others on the machine can only make one longer."""
    seconds: list[list[float]] = [[] for _ in ways]
    for run, passes in zip(ways, seconds, strict=True):
        _run_for(_TRY_S, run, passes, device)
    fastest = min(range(len(ways)), key=lambda way: min(seconds[way]))
    _run_for(_ENOUGH_S, ways[fastest], seconds[fastest], device)
    return max(min(seconds[fastest]), 1e-9)


def _run_for(enough_s: float, run: Callable[[], object], passes: list[float], device: torch.device) -> None:
    """Adds to `passes`, the seconds of each, until they are enough together."""
    while len(passes) < _MOST_REPEATS and sum(passes) < enough_s:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        passes.append(time.perf_counter() - began)
