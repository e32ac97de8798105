"""What happens to rows between a layer's attention and the next one's.

The layer's end: `residual += output(attended)`, then `residual += down(silu(gate) * up)` of the normed residual stream. The next one's
start: RMSNorm, fused QKV, RoPE with KV write. Bound: weight bytes for few rows, FLOPs for many. Source of the gated product: Shazeer,
arXiv 2002.05202 (SwiGLU).

One operation, so that a backend can take rows through all of it while they are in its caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from batchllm.kernels.linear import (
    linear_add,
    linear_add_triton,
    linear_rope_write_kv,
    linear_rope_write_kv_triton,
    linear_silu_mul,
    linear_silu_mul_triton,
)
from batchllm.kernels.norm import rms_norm, rms_norm_triton


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """What follows a layer's attention: packed products and the norm's weight [hidden_size]; `gate_up` from `pack_linear_gated`."""

    output: Any
    norm: torch.Tensor
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class LayerStart:
    """What precedes a layer's attention: the norm's weight [hidden_size] and the packed product for queries, keys and values."""

    norm: torch.Tensor
    qkv: Any


@dataclass(frozen=True, slots=True)
class KvTarget:
    """Where rows stand and where their queries, keys and values of layer `layer` go; see `rope_write_kv`."""

    cos_sin: torch.Tensor
    kv: torch.Tensor
    layer: int
    positions: torch.Tensor
    slots: torch.Tensor
    num_heads: int
    kv_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowOperations:
    """The operations of which a backend's `between_attention` can be put together: `in_turn` is its meaning."""

    rms_norm: Callable[..., torch.Tensor]
    linear_add: Callable[[torch.Tensor, Any, torch.Tensor], None]
    linear_silu_mul: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_rope_write_kv: Callable[..., torch.Tensor]

    def in_turn(
        self,
        residual: torch.Tensor,
        *,
        eps: float,
        attended: torch.Tensor | None = None,
        end: LayerEnd | None = None,
        start: LayerStart | None = None,
        target: KvTarget | None = None,
    ) -> torch.Tensor | None:
        """The queries [num_rows, num_heads, head_dim] of the layer that starts, None where none does.

        A layer that ends adds to `residual` [num_rows, hidden_size] **in place** what follows from its `attended`
        [num_rows, num_heads * head_dim]. Between the products rows have residual's dtype.
        """
        if end is not None:
            assert attended is not None, "a layer ends with what its attention gave"
            self.linear_add(attended, end.output, residual)
            hidden = self.rms_norm(residual, end.norm, eps=eps)
            self.linear_add(self.linear_silu_mul(hidden, end.gate_up), end.down, residual)
        if start is None:
            return None
        assert target is not None, "keys and values go somewhere"
        return self.linear_rope_write_kv(
            self.rms_norm(residual, start.norm, eps=eps),
            start.qkv,
            target.cos_sin,
            target.kv,
            layer=target.layer,
            positions=target.positions,
            slots=target.slots,
            num_heads=target.num_heads,
            kv_scale=target.kv_scale,
        )


between_attention = RowOperations(rms_norm, linear_add, linear_silu_mul, linear_rope_write_kv).in_turn
"""The reference."""

between_attention_triton = RowOperations(
    rms_norm_triton, linear_add_triton, linear_silu_mul_triton, linear_rope_write_kv_triton
).in_turn
"""On a GPU, where what one kernel writes is found in the second cache level by the next."""
