"""The feed-forward part of a layer: `residual += down(silu(gate) * up)` of the normed residual stream.

Shapes: residual [num_rows, hidden_size]; norm_weight [hidden_size]; gate_up from `pack_linear_gated`, 2 gated_size outputs; down gated_size
inputs. Bound: weight bytes for few rows, FLOPs for many. Source: Shazeer, arXiv 2002.05202 (SwiGLU).

One operation, so that a backend can take rows through all of it while they are in its caches.
"""

from __future__ import annotations

import torch

from batchllm.kernels.linear import (
    PackedLinear,
    linear_add,
    linear_add_triton,
    linear_silu_mul,
    linear_silu_mul_triton,
)
from batchllm.kernels.norm import rms_norm, rms_norm_triton


def feed_forward(
    residual: torch.Tensor, norm_weight: torch.Tensor, gate_up: PackedLinear, down: PackedLinear, *, eps: float
) -> None:
    """Adds to `residual` **in place**; between the products rows have its dtype."""
    hidden = rms_norm(residual, norm_weight, eps=eps)
    linear_add(linear_silu_mul(hidden, gate_up), down, residual)


def feed_forward_triton(
    residual: torch.Tensor, norm_weight: torch.Tensor, gate_up: PackedLinear, down: PackedLinear, *, eps: float
) -> None:
    """`feed_forward` on a GPU, where what one kernel writes is found in the second cache level by the next."""
    hidden = rms_norm_triton(residual, norm_weight, eps=eps)
    linear_add_triton(linear_silu_mul_triton(hidden, gate_up), down, residual)
