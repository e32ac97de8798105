"""Linear layers over weights packed once: `y = x W^T + b`, and the products with a fused end that the decoder needs.

Shapes: x [num_rows, in_size], weight [out_size, in_size], y [num_rows, out_size]. Bound: weight bytes for few rows, FLOPs for many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


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


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """y in x's dtype, accumulated in float32 or better."""
    return F.linear(x, packed.weight, packed.bias)


def linear_argmax(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """The index int64 [num_rows] of the largest of y's float32 values; the lowest index among equals."""
    # argmax leaves the choice among equals open, so the first maximum is found by comparison.
    logits = F.linear(x, packed.weight, packed.bias).float()
    return (logits == logits.amax(dim=-1, keepdim=True)).to(torch.uint8).argmax(dim=-1)
