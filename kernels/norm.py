"""RMSNorm with residual add: `h = x + residual; out = h * rsqrt(mean(h^2) + eps) * weight`, statistics in float32.

Bound: memory. Shapes: x, residual [num_rows, hidden_size]; weight [hidden_size].
Source: Zhang and Sennrich, arXiv 1910.07467.

On a GPU one program takes one row and keeps it in registers between the two passes, so each byte is moved once and a
row's bits do not depend on the batch.
"""

from __future__ import annotations

import torch

from batchllm.kernels.launch import jit, launch, next_power_of_2, tl
from batchllm.kernels.tuning import bounded_config, launch_options


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


@jit()
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    hidden_size: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden_size
    h = tl.load(x + row * x_stride + column, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + column
        h = (h.to(tl.float32) + tl.load(place, mask=mask, other=0.0).to(tl.float32)).to(h.dtype)
        tl.store(place, h, mask=mask)
    wide = h.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / hidden_size + eps)
    # Rounded before the weight is applied, as in the reference.
    scaled = (wide * scale).to(h.dtype).to(tl.float32)
    normed = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) * scaled
    tl.store(out + row * hidden_size + column, normed.to(h.dtype), mask=mask)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`rms_norm` on a GPU; the rows of `x` and `residual` may have any stride, the weight has x's dtype.

    Raises ValueError for rows of more than 16,384, which would not stay in registers.
    """
    num_rows, hidden_size = x.shape
    if hidden_size > 16384:
        raise ValueError(f"rms_norm takes rows of up to 16384 values on a GPU, not {hidden_size}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    config = bounded_config("rms_norm", "any", hidden_size, x.device)
    launch(
        _rms_norm_kernel,
        (num_rows,),
        device=x.device,
        arguments={
            "x": x,
            "residual": residual,
            "weight": weight,
            "out": out,
            "x_stride": x.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
            "hidden_size": hidden_size,
            "eps": eps,
            "HAS_RESIDUAL": residual is not None,
            "BLOCK": next_power_of_2(hidden_size),
        },
        options=launch_options(config),
    )
    return out
