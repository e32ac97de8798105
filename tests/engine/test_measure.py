"""Rates measured with random weights of a model's shape."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from batchllm.engine import measure
from batchllm.engine.measure import StepLoad, measure_rates
from batchllm.models.random_model import SMALL

TINY = replace(SMALL, vocab_size=300, max_context=512, tied_embeddings=False, qkv_bias=True)
CPU = torch.device("cpu")
ONE = StepLoad(max_sequences=1, max_tokens=512, held_tokens=1000)


@pytest.mark.parametrize(
    "load",
    [
        StepLoad(max_sequences=20, max_tokens=512, held_tokens=1000),
        StepLoad(max_sequences=20, max_tokens=24, held_tokens=1000),
    ],
)
def test_rates_are_numbers_above_zero_for_rising_batches(load: StepLoad) -> None:
    rates = measure_rates(TINY, dtype=torch.float32, device=CPU, load=load)
    assert [sequences for sequences, _ in rates.decode_step_s] == [1, 8, 20]
    values = [getattr(rates, field.name) for field in fields(rates) if field.name.endswith("_per_s")]
    values += [seconds for _, seconds in rates.decode_step_s]
    assert len(values) == 9 and all(value > 0 and math.isfinite(value) for value in values)
    assert rates.expected is None


def test_attention_is_timed_apart_from_the_rows_it_belongs_to() -> None:
    """With many heads and next to nothing else, a prompt's attention outweighs its products."""
    heads = replace(TINY, num_heads=16, num_kv_heads=2, head_dim=64, intermediate_size=32)
    rates = measure_rates(
        heads, dtype=torch.float32, device=CPU, load=StepLoad(max_sequences=1, max_tokens=512, held_tokens=1000)
    )
    pairs_of_a_long_prompt = 2048 * 2049 / 2
    assert pairs_of_a_long_prompt / rates.prefill_pairs_per_s > 2048 / rates.prefill_tokens_per_s
    # A spared read is cheaper than a read, or there would be no use in sharing.
    assert rates.kv_spared_bytes_per_s > rates.kv_read_bytes_per_s


def test_a_deep_model_is_timed_on_a_few_layers_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LAYERS_BYTES", 1)
    shallow = measure_rates(TINY, dtype=torch.float32, device=CPU, load=ONE)
    deep = measure_rates(replace(TINY, num_layers=2000), dtype=torch.float32, device=CPU, load=ONE)
    # A thousand times the layers; wide margins, since a busy machine times a short pass badly.
    assert shallow.prefill_tokens_per_s > 30 * deep.prefill_tokens_per_s
    assert deep.decode_step_s[0][1] > 30 * shallow.decode_step_s[0][1]
