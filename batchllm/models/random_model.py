"""A small model of random numbers: for tests and benchmarks that need what a model does, and no sense in what it says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchllm.models.config import ModelConfig, RopeConfig
from batchllm.models.weights import canonical_shapes

SMALL = ModelConfig(
    architecture="llama",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=64,
    max_context=256,
    rms_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    tied_embeddings=True,
    qkv_bias=False,
    bos_id=None,
    eos_ids=frozenset(),
)
"""A grouped-query model of 0.1 million weights without an end token; `dataclasses.replace` makes others of it."""


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Normally distributed weights of deviation `scale` and norms of one; the same `seed` gives the same model."""

    config: ModelConfig = SMALL
    seed: int = 0
    scale: float = 0.3

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shapes = canonical_shapes(self.config)
        if len(shapes[name]) == 1:
            return torch.ones(shapes[name], dtype=dtype)
        generator = torch.Generator().manual_seed(1000 * self.seed + sorted(shapes).index(name))
        return (torch.randn(shapes[name], generator=generator) * self.scale).to(dtype)
