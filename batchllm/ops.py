"""The one place that picks kernels. Nothing else asks which backend runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from batchllm.errors import JobError
from batchllm.kernels import activation, attention, attention_triton, blocks, launch, linear, norm, rope, sampling
from batchllm.kernels.attention import AttentionPlan
from batchllm.kernels.sampling import SamplingBatch

ENVIRONMENT_VARIABLE = "BATCHLLM_KERNELS"


class RmsNorm(Protocol):
    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class RopeWriteKv(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        *,
        layer: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        num_heads: int,
    ) -> torch.Tensor: ...


class Attention(Protocol):
    def __call__(
        self, query: torch.Tensor, kv: torch.Tensor, *, layer: int, plan: AttentionPlan, scale: float
    ) -> torch.Tensor: ...


class PackLinear(Protocol):
    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """One backend's operations. Signatures and meaning: the reference functions in `kernels/`."""

    name: str
    rms_norm: RmsNorm
    rope_write_kv: RopeWriteKv
    attention: Attention
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    pack_linear: PackLinear
    linear: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_argmax: Callable[[torch.Tensor, Any], torch.Tensor]
    gather_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    scatter_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    sample: Callable[[torch.Tensor, SamplingBatch], torch.Tensor] = sampling.sample


REFERENCE = Kernels(
    name="reference",
    rms_norm=norm.rms_norm,
    rope_write_kv=rope.rope_write_kv,
    attention=attention.attention,
    silu_mul=activation.silu_mul,
    pack_linear=linear.pack_linear,
    linear=linear.linear,
    linear_argmax=linear.linear_argmax,
    gather_blocks=blocks.gather_blocks,
    scatter_blocks=blocks.scatter_blocks,
    copy_blocks=blocks.copy_blocks,
)

TRITON = Kernels(
    name="triton",
    rms_norm=norm.rms_norm_triton,
    rope_write_kv=rope.rope_write_kv_triton,
    attention=attention_triton.attention_triton,
    silu_mul=activation.silu_mul_triton,
    pack_linear=linear.pack_linear,
    linear=linear.linear_triton,
    linear_argmax=linear.linear_argmax_triton,
    gather_blocks=blocks.gather_blocks_triton,
    scatter_blocks=blocks.scatter_blocks_triton,
    copy_blocks=blocks.copy_blocks_triton,
    sample=sampling.sample_triton,
)


def select_kernels(device: torch.device) -> Kernels:
    """The kernels for `device`. `BATCHLLM_KERNELS` names a backend; asking for one that cannot run raises JobError."""
    asked = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if asked == "triton":
        if not launch.can_run(device):
            what = "needs a CUDA device" if launch.triton else "needs triton installed (the extra named gpu)"
            raise JobError(f"{ENVIRONMENT_VARIABLE}=triton {what}; the job's device is {device}")
        return TRITON
    if asked == "" and device.type == "cuda" and launch.can_run(device):
        return TRITON
    if asked in ("", "reference"):
        return REFERENCE
    raise JobError(f"{ENVIRONMENT_VARIABLE}={asked}: no such kernels; use reference or triton")
