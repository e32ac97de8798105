"""Rates measured with random weights of a model's shape."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from batchllm.engine import measure
from batchllm.engine.measure import measure_rates
from batchllm.models.random_model import SMALL

TINY = replace(SMALL, vocab_size=300, max_context=512, tied_embeddings=False, qkv_bias=True)
CPU = torch.device("cpu")


def test_rates_are_numbers_above_zero_for_rising_batches() -> None:
    rates = measure_rates(TINY, dtype=torch.float32, device=CPU, max_sequences=20)
    assert [sequences for sequences, _ in rates.decode_step_s] == [1, 8, 20]
    values = [rates.prefill_tokens_per_s, rates.kv_read_bytes_per_s, *(seconds for _, seconds in rates.decode_step_s)]
    assert all(value > 0 and math.isfinite(value) for value in values)
    assert rates.generated_share == 1.0


def test_a_deep_model_is_timed_on_a_few_layers_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LAYERS_BYTES", 1)
    shallow = measure_rates(TINY, dtype=torch.float32, device=CPU, max_sequences=1)
    deep = measure_rates(replace(TINY, num_layers=2000), dtype=torch.float32, device=CPU, max_sequences=1)
    # A thousand times the layers; wide margins, since a busy machine times a short pass badly.
    assert shallow.prefill_tokens_per_s > 30 * deep.prefill_tokens_per_s
    assert deep.decode_step_s[0][1] > 30 * shallow.decode_step_s[0][1]
