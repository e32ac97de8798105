"""SiLU-gated product: `out = silu(gate) * up`, silu(x) = x / (1 + exp(-x)).

Bound: memory. On a GPU a program takes one run of columns of one row: no value is used twice, so there is nothing to
tile for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from batchllm.kernels.launch import jit, launch, tl
from batchllm.kernels.tuning import exact_config, launch_options


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [num_rows, 2 * size], gate first -> [num_rows, size], same dtype; silu is rounded before the
    product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@jit()
def _silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, row_stride: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * row_stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up + row * row_stride + size + column, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * size + column, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` on a GPU; rows of any stride."""
    num_rows, width = gate_up.shape
    size = width // 2
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    config = exact_config("silu_mul", "any", gate_up.device)
    launch(
        _silu_mul_kernel,
        (num_rows, -(-size // config["block"])),
        device=gate_up.device,
        arguments={
            "gate_up": gate_up,
            "out": out,
            "row_stride": gate_up.stride(0),
            "size": size,
            "BLOCK": config["block"],
        },
        options=launch_options(config),
    )
    return out
