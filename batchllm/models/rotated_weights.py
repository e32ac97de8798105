"""Weights turned so that no channel of the residual stream stands out: what eight bits a row need, at no cost in a step.

A few channels of a trained model are many times larger than the rest, and a row that is rounded to its largest number loses the others. The
decoder computes the same with its residual stream turned by any rotation R, once each norm's weight is taken into the products that
follow it: embeddings E R; what reads the stream W diag(norm) R; what writes it R^T W. Each head's values may be turned as well,
and the output projection the other way. R mixes all channels evenly.
"""

from __future__ import annotations

import math

import torch

from batchllm.models.config import ModelConfig
from batchllm.models.weights import Weights

_LARGEST_HADAMARD = 64

_NORM_OF = {"q": "attn_norm", "k": "attn_norm", "v": "attn_norm", "gate": "mlp_norm", "up": "mlp_norm"}


class Rotation:
    """An orthogonal matrix of one size, the same for the same size; multiplies the last dimension.

    It is random signs, then a product over small matrices, each along a dimension of its own: Hadamard's for the powers of two in the size,
    and Hartley's for what is left. All entries are of about one magnitude.
    """

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self._signs = torch.randint(2, (size,), generator=generator) * 2.0 - 1.0
        power = size & -size
        self._factors = [_hartley(size // power)]
        while power > 1:
            part = min(power, _LARGEST_HADAMARD)
            self._factors.append(_hadamard(part))
            power //= part

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x R, float32 [..., size]."""
        shape = x.shape
        x = x * self._signs
        after = 1
        for factor in self._factors:
            if len(factor) > 1:
                x = factor.T @ x.reshape(-1, len(factor), after) if after > 1 else x.reshape(-1, len(factor)) @ factor
            after *= len(factor)
        return x.reshape(shape)


def _hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]])) / math.sqrt(2)
    return matrix


def _hartley(size: int) -> torch.Tensor:
    number = torch.arange(size, dtype=torch.float64)
    angle = 2 * math.pi * (torch.outer(number, number) % size) / size
    return ((angle.cos() + angle.sin()) / math.sqrt(size)).float()


class RotatedWeights:
    """Reads from other weights, turned; a model of these computes what one of those does, but for rounding.

    `lm_head` can be read of every model: tied embeddings differ from it once they are turned.
    """

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        self._weights = weights
        self._config = config
        self._stream = Rotation(config.hidden_size)
        self._head = Rotation(config.head_dim)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """As `Weights.read`. A norm's weight is ones."""
        return self._turned(name).to(dtype).contiguous()

    def _turned(self, name: str) -> torch.Tensor:
        if name == "lm_head":
            stored = "embed" if self._config.tied_embeddings else name
            return self._read_stream(self._weights.read(stored, torch.float32), "final_norm")
        weight = self._weights.read(name, torch.float32)
        prefix, _, part = name.rpartition(".")
        if part.endswith("norm"):
            return torch.ones_like(weight)
        if part == "embed":
            return self._stream(weight)
        if part in ("o", "down"):
            if part == "o":
                weight = self._head(weight.unflatten(1, (-1, self._config.head_dim))).flatten(1)
            return self._stream(weight.T).T
        if part == "v_bias":
            return self._head(weight.unflatten(0, (-1, self._config.head_dim))).flatten()
        if part not in _NORM_OF:
            return weight
        if part == "v":
            heads = weight.unflatten(0, (-1, self._config.head_dim))
            weight = self._head(heads.transpose(1, 2)).transpose(1, 2).flatten(0, 1)
        return self._read_stream(weight, f"{prefix}.{_NORM_OF[part]}")

    def _read_stream(self, weight: torch.Tensor, norm: str) -> torch.Tensor:
        return self._stream(weight * self._weights.read(norm, torch.float32))
