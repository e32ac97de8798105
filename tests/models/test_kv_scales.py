"""Scales of 8-bit keys and values: of the model alone, powers of two, and right for what a layer makes."""

from __future__ import annotations

import torch

from batchllm.models.config import ModelConfig, RopeConfig
from batchllm.models.kv_scales import TYPICAL, kv_scales
from batchllm.models.rotated_weights import RotatedWeights
from batchllm.models.weights import canonical_shapes


class RandomWeights:
    """Weights by name; the second KV head's values are 30 times as large, and norms are not 1."""

    def __init__(self, config: ModelConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 1.0)
            for name, shape in canonical_shapes(config).items()
        }
        self.tensors["layers.1.v"][config.head_dim :] *= 30

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[name].to(dtype)


CONFIG = ModelConfig(
    architecture="tiny",
    max_context=64,
    rms_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    tied_embeddings=True,
    qkv_bias=True,
    bos_id=None,
    eos_ids=frozenset(),
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=64,
    vocab_size=50,
)


def test_what_a_layer_makes_is_stored_at_its_typical_size() -> None:
    weights = RandomWeights(CONFIG)
    scales = kv_scales(CONFIG, weights)
    x = torch.randn(4000, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    x = x / x.square().mean(dim=1, keepdim=True).sqrt()
    for layer in range(CONFIG.num_layers):
        normed = x * weights.tensors[f"layers.{layer}.attn_norm"]
        for side, name in enumerate(("k", "v")):
            made = normed @ weights.tensors[f"layers.{layer}.{name}"].T + weights.tensors[f"layers.{layer}.{name}_bias"]
            heads = made.view(-1, CONFIG.num_kv_heads, CONFIG.head_dim) / scales[layer, side][:, None]
            sizes = heads.square().mean(dim=(0, 2)).sqrt() / TYPICAL
            # Rounding to a power of two moves it by half an octave at most.
            assert bool((sizes > 2**-0.55).all() and (sizes < 2**0.55).all())
    assert scales[1, 1, 1] / scales[1, 1, 0] in (16.0, 32.0)


def test_scales_are_powers_of_two() -> None:
    mantissa, _ = torch.frexp(kv_scales(CONFIG, RandomWeights(CONFIG)))
    assert bool((mantissa == 0.5).all())


def test_turned_weights_have_the_scales_of_those_they_are_read_from() -> None:
    weights = RandomWeights(CONFIG)
    assert torch.equal(kv_scales(CONFIG, RotatedWeights(weights, CONFIG)), kv_scales(CONFIG, weights))
