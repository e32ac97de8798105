"""Turned weights: the same model, with no channel that stands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from batchllm.models.decoder import Decoder
from batchllm.models.huggingface_config import huggingface_config
from batchllm.models.loading import load_decoder
from batchllm.models.rotated_weights import RotatedWeights, Rotation
from batchllm.models.safetensors_weights import SafetensorsWeights
from batchllm.ops import REFERENCE

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 7, 24, 64, 576, 4096])
def test_a_rotation_is_orthogonal_and_spreads_each_channel_over_all(size):
    matrix = Rotation(size)(torch.eye(size))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-5)
    assert float(matrix.abs().max()) * size**0.5 < 1.5


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "llama-tied"])
def test_a_turned_model_computes_what_the_model_does(
    save_tiny: Callable[..., Any], make_driver: Callable[..., Any], name: str
) -> None:
    _, source = save_tiny(name)
    plain = load_decoder(source, dtype=torch.float32, device=CPU, kernels=REFERENCE)
    config = huggingface_config(source.path)
    turned_weights = RotatedWeights(SafetensorsWeights(source.path, config), config)
    turned = Decoder(config, turned_weights, dtype=torch.float32, device=CPU, kernels=REFERENCE, fingerprint="turned")
    # Tied embeddings are two tensors once they are turned.
    turned._head = REFERENCE.pack_linear(turned_weights.read("lm_head", torch.float32))
    turned._embed = turned_weights.read("embed", torch.float32)
    prompt = [3, 1, 4, 15, 9, 2, 6]
    logits = []
    for decoder in (plain, turned):
        driver = make_driver(decoder, num_sequences=1, max_tokens=16)
        logits.append(decoder.logits(driver.step([prompt], num_sampled=len(prompt))))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4 * float(logits[0].abs().max()))
