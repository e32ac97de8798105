"""What keys and values are divided by before they are kept in 8 bits: fixed numbers of a model, read off its weights.

A scale that followed the data would tie a row's bits to its neighbours and to its own past, and blocks kept from one
run to the next would not fit together. So each layer has one for the keys of each KV head, and one for its values: a
row that enters the projection has mean square 1 before the norm's weight w, so output i of a matrix W has about the
size |W[i] * w| (with a bias b, sqrt(|W[i] * w|^2 + b[i]^2)). The root mean square of that over a head, RoPE leaves it
alone, is put at `TYPICAL` of e4m3's 448: values 32 times as large are stored without saturating, and values a 900th
as large without losing a bit. Scales are powers of two, so scaling itself rounds nothing.
"""

from __future__ import annotations

import torch

from batchllm.models.config import ModelConfig
from batchllm.models.weights import Weights

TYPICAL = 14.0
"""The stored size of a typical key or value."""


def kv_scales(config: ModelConfig, weights: Weights) -> torch.Tensor:
    """float32 [num_layers, 2, num_kv_heads], on the CPU; keys are index 0. Reads two matrices and a norm a layer."""
    scales = torch.empty(config.num_layers, 2, config.num_kv_heads)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        norm = weights.read(prefix + "attn_norm", torch.float32)
        for side, name in enumerate(("k", "v")):
            squares = (weights.read(prefix + name, torch.float32) * norm).square().sum(dim=1)
            if config.qkv_bias:
                squares += weights.read(f"{prefix}{name}_bias", torch.float32).square()
            size = squares.view(config.num_kv_heads, config.head_dim).mean(dim=1).sqrt().cpu()
            scales[layer, side] = torch.exp2((size / TYPICAL).clamp(min=2.0**-60).log2().round())
    return scales
