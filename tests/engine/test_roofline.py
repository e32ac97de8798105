"""What the machine is measured to do at best."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchllm.engine import roofline
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.roofline import measure_limits, run_roofline
from batchllm.ops import REFERENCE
from batchllm.planner.work import PlanWork


def test_machine_is_measured_once_a_process_and_no_product_of_the_same_size_beats_it_by_much() -> None:
    device = torch.device("cpu")
    limits = measure_limits(REFERENCE, dtype=torch.float32, device=device)
    assert measure_limits(REFERENCE, dtype=torch.float32, device=device) is limits

    rows, weight = torch.randn(512, 2048), torch.randn(2048, 2048)
    began = time.perf_counter()
    torch.nn.functional.linear(rows, weight)
    rate = 2 * 512 * 2048 * 2048 / (time.perf_counter() - began)
    # A neighbour may have slowed down either of the two, but not by three orders of magnitude.
    assert 1e-3 < rate / limits.flops_per_s < 1e3
    assert 1e8 < limits.bytes_per_s < 1e14


def test_a_run_that_reached_more_than_all_measures_the_machine_again_and_the_best_of_both_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 2) | dict.fromkeys(
        ("hidden_size", "head_dim", "intermediate_size", "vocab_size"), 64
    )
    decoder: Any = SimpleNamespace(
        config=SimpleNamespace(**sizes),
        bytes_per_weight=2,
        kv_dtype=torch.float16,
        kernels=REFERENCE,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )
    work = PlanWork(prompt_tokens=100_000, prompt_pairs=1, num_samples=1)
    metrics = RunMetrics(model_s=1.0, computed_prompt_tokens=100_000)
    products, reads = iter([1e9, 1e12, 1e10]), iter([2e9, 1e9, 3e9])
    monkeypatch.setattr(roofline, "_product_rate", lambda *_: next(products))
    monkeypatch.setattr(roofline, "_read_rate", lambda *_: next(reads))
    monkeypatch.setattr(roofline, "_measured", {})

    found = run_roofline(work, decoder=decoder, metrics=metrics, max_step_tokens=512)
    assert found is not None
    assert (found.flops_per_s, found.bytes_per_s) == (1e12, 2e9)
    assert 0 < found.share < 1
    # What a run reached of it is plausible now, so nothing is measured any more.
    assert run_roofline(work, decoder=decoder, metrics=metrics, max_step_tokens=512) == found
    assert next(products) == 1e10
