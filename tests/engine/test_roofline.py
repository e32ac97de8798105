"""What the machine is measured to do at best."""

from __future__ import annotations

import time

import torch

from batchllm.engine.roofline import measure_limits
from batchllm.ops import REFERENCE


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
