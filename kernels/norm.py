"""RMSNorm with residual add: `h = x + residual; out = h * rsqrt(mean(h^2) + eps) * weight`, statistics in float32.

Bound: memory. Shapes: x, residual [num_rows, hidden_size]; weight [hidden_size]. Source: Zhang and Sennrich, arXiv 1910.07467.
"""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The normed rows, in x's dtype. With a residual, x is added into it **in place** first and the sum is normed."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    # Rounded before the weight is applied, as the reference implementations of the Llama family do.
    return weight * scaled.to(x.dtype)
