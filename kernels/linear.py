"""Linear layers over weights packed once: `y = x W^T + b`, and the products with a fused end that the decoder needs.

Shapes: x [num_rows, in_size], weight [out_size, in_size], y [num_rows, out_size]. Bound: weight bytes for few rows, FLOPs for many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from batchllm.kernels.activation import silu_mul
from batchllm.kernels.rope import rope_write_kv


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the form that one backend multiplies with; made by its `pack_linear`, opaque to all else."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_size: int
    in_size: int


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """Takes the weight [out_size, in_size] as it is: the plain product needs no other form."""
    return PackedLinear(weight=weight.contiguous(), bias=bias, out_size=weight.shape[0], in_size=weight.shape[1])


def pack_linear_gated(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """As `pack_linear`, for `linear_silu_mul` alone: the rows of the gate [size, in_size], then those of up."""
    return pack_linear(weight, bias)


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """y in x's dtype, accumulated in float32 or better."""
    return F.linear(x, packed.weight, packed.bias)


def linear_argmax(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """The index int64 [num_rows] of the largest of y's float32 values; the lowest index among equals."""
    # argmax leaves the choice among equals open, so the first maximum is found by comparison.
    logits = F.linear(x, packed.weight, packed.bias).float()
    return (logits == logits.amax(dim=-1, keepdim=True)).to(torch.uint8).argmax(dim=-1)


def linear_add(x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor) -> None:
    """Adds y **in place** into `residual` [num_rows, out_size]."""
    residual += linear(x, packed)


def linear_silu_mul(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """silu(gate) * up [num_rows, out_size / 2] of the two halves of y; `packed` by `pack_linear_gated`."""
    return silu_mul(linear(x, packed))


def linear_rope_write_kv(
    x: torch.Tensor,
    packed: PackedLinear,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """`rope_write_kv` of y."""
    return rope_write_kv(
        linear(x, packed), cos_sin, kv, layer=layer, positions=positions, slots=slots, num_heads=num_heads
    )
