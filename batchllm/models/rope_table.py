"""The rotary table: cosines and sines of every position, computed once per model in float32."""

from __future__ import annotations

import math

import torch

from batchllm.models.config import ModelConfig


def rope_table(config: ModelConfig, *, num_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [num_positions, head_dim]: the cosines of head_dim / 2 angles, then their sines."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), rope_frequencies(config))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 [head_dim / 2]: radians per position, scaled as the config says."""
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (rope.theta**exponents) / rope.linear_factor
    if rope.factors is not None:
        frequencies = frequencies / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.llama3 is not None:
        scaling = rope.llama3
        wavelengths = 2 * math.pi / frequencies
        # 0 at the longest wavelength that is blended, 1 at the shortest; outside it is all or nothing.
        kept = (scaling.original_max_context / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        kept = kept.clamp(0.0, 1.0)
        frequencies = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    return frequencies
