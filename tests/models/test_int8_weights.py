"""A decoder with int8 weights: near the one without, the same on every backend, and never taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from batchllm.errors import ModelError
from batchllm.models.decoder import INT8_PARTS, PARTS, Decoder, int8_parts_for
from batchllm.models.loading import load_decoder
from batchllm.models.source import ModelSource
from batchllm.ops import REFERENCE, Kernels, native_kernels

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 15, 9, 2, 6], [5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]]


def loaded(source: ModelSource, kernels: Kernels, parts: frozenset[str], dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(source, dtype=dtype, device=CPU, kernels=kernels, int8_parts=parts)


def logits_of(decoder: Decoder, make_driver: Callable[..., Any]) -> torch.Tensor:
    driver = make_driver(decoder, num_sequences=len(PROMPTS), max_tokens=16)
    return decoder.logits(driver.step(PROMPTS, num_sampled=2))


def error_share(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result - truth).norm() / truth.norm())


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "llama-tied"])
def test_int8_weights_stay_near_the_model(save_tiny: Callable[..., Any], make_driver: Callable[..., Any], name) -> None:
    _, source = save_tiny(name)
    truth = logits_of(loaded(source, REFERENCE, frozenset()), make_driver)
    rounded = logits_of(loaded(source, REFERENCE, PARTS), make_driver)
    assert 1e-4 < error_share(rounded, truth) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2"])
def test_native_int8_weights_are_the_references(
    save_tiny: Callable[..., Any], make_driver: Callable[..., Any], name: str, dtype: torch.dtype
) -> None:
    native = native_kernels()
    if isinstance(native, str):
        pytest.skip(f"native kernels: {native}")
    _, source = save_tiny(name)
    truth = logits_of(loaded(source, REFERENCE, PARTS, dtype), make_driver)
    result = logits_of(loaded(source, native, PARTS, dtype), make_driver)
    # A last bit that differs may round to the other of two numbers.
    assert error_share(result, truth) < (0.02 if dtype == torch.float32 else 0.05)


def test_rounded_weights_have_a_fingerprint_of_their_own(save_tiny: Callable[..., Any]) -> None:
    _, source = save_tiny("llama3")
    ways = (frozenset[str](), frozenset({"down"}), INT8_PARTS, PARTS)
    assert len({loaded(source, REFERENCE, parts).fingerprint for parts in ways}) == 4


def test_what_a_job_calls_weights_is_read_and_the_rest_refused() -> None:
    assert int8_parts_for("auto") == frozenset()
    assert int8_parts_for("int8") == INT8_PARTS <= PARTS
    with pytest.raises(ModelError, match="weights 'int4' are not known; auto and int8 are"):
        int8_parts_for("int4")
