"""SiLU-gated product: `out = silu(gate) * up`, silu(x) = x / (1 + exp(-x)). Bound: memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [num_rows, 2 * size], gate first -> [num_rows, size], same dtype; silu is rounded before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
