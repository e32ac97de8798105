"""The one place that picks kernels. Nothing else asks which backend runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from batchllm.errors import JobError
from batchllm.kernels import (
    activation,
    attention,
    attention_triton,
    between_attention,
    blocks,
    launch,
    layers,
    linear,
    norm,
    rope,
    sampling,
)
from batchllm.kernels.attention import AttentionPlan, HeadShape
from batchllm.kernels.between_attention import KvTarget, LayerEnd, LayerStart
from batchllm.kernels.floats import FP8_DTYPE
from batchllm.kernels.layers import Layer
from batchllm.kernels.native import arguments as native_arguments
from batchllm.kernels.native import layers as native_layers
from batchllm.kernels.native import library as native_library
from batchllm.kernels.native import operations as native
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
        kv_scale: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class Attention(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        *,
        layer: int,
        plan: AttentionPlan,
        scale: float,
        kv_scale: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class PackLinear(Protocol):
    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, int8: bool = False) -> Any: ...


class LinearRopeWriteKv(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        packed: Any,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        *,
        layer: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        num_heads: int,
        kv_scale: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class BetweenAttention(Protocol):
    def __call__(
        self,
        residual: torch.Tensor,
        *,
        eps: float,
        attended: torch.Tensor | None = None,
        end: LayerEnd | None = None,
        start: LayerStart | None = None,
        target: KvTarget | None = None,
    ) -> torch.Tensor | None: ...


class ToLastAttention(Protocol):
    def __call__(
        self,
        residual: torch.Tensor,
        layers: Any,
        *,
        eps: float,
        target: KvTarget,
        plan: AttentionPlan,
        scale: float,
    ) -> torch.Tensor | None: ...


class AfterLastAttention(Protocol):
    def __call__(
        self,
        residual: torch.Tensor,
        attended: torch.Tensor,
        layers: Any,
        *,
        rows: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """One backend's operations. Signatures and meaning: the reference functions in `kernels/`.

    `kv_dtypes`: what a pool may hold instead of the activations' own dtype. `never_waits`: on a GPU no operation needs a number on the host,
    so that steps can be captured in a graph.
    """

    name: str
    rms_norm: RmsNorm
    rope_write_kv: RopeWriteKv
    attention: Attention
    schedule_attention: Callable[[AttentionPlan, HeadShape], AttentionPlan]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    pack_linear: PackLinear
    packed_rows: Callable[[Any, torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_logits: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_argmax: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_add: Callable[[torch.Tensor, Any, torch.Tensor], None]
    pack_linear_gated: PackLinear
    linear_silu_mul: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_rope_write_kv: LinearRopeWriteKv
    between_attention: BetweenAttention
    pack_layers: Callable[[Sequence[Layer]], Any]
    to_last_attention: ToLastAttention
    after_last_attention: AfterLastAttention
    gather_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    scatter_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    sample: Callable[[torch.Tensor, SamplingBatch], torch.Tensor] = sampling.sample
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    never_waits: bool = False


REFERENCE = Kernels(
    name="reference",
    rms_norm=norm.rms_norm,
    rope_write_kv=rope.rope_write_kv,
    attention=attention.attention,
    schedule_attention=attention.schedule_attention,
    silu_mul=activation.silu_mul,
    pack_linear=linear.pack_linear,
    packed_rows=linear.packed_rows,
    linear=linear.linear,
    linear_logits=linear.linear_logits,
    linear_argmax=linear.linear_argmax,
    linear_add=linear.linear_add,
    pack_linear_gated=linear.pack_linear_gated,
    linear_silu_mul=linear.linear_silu_mul,
    linear_rope_write_kv=linear.linear_rope_write_kv,
    between_attention=between_attention.between_attention,
    pack_layers=layers.pack_layers,
    to_last_attention=layers.to_last_attention,
    after_last_attention=layers.after_last_attention,
    gather_blocks=blocks.gather_blocks,
    scatter_blocks=blocks.scatter_blocks,
    copy_blocks=blocks.copy_blocks,
    kv_dtypes=frozenset({FP8_DTYPE}),
)

TRITON = Kernels(
    name="triton",
    rms_norm=norm.rms_norm_triton,
    rope_write_kv=rope.rope_write_kv_triton,
    attention=attention_triton.attention_triton,
    schedule_attention=attention_triton.schedule_attention_triton,
    silu_mul=activation.silu_mul_triton,
    pack_linear=linear.pack_linear,
    packed_rows=linear.packed_rows,
    linear=linear.linear_triton,
    linear_logits=linear.linear_logits_triton,
    linear_argmax=linear.linear_argmax_triton,
    linear_add=linear.linear_add_triton,
    pack_linear_gated=linear.pack_linear_gated,
    linear_silu_mul=linear.linear_silu_mul_triton,
    linear_rope_write_kv=linear.linear_rope_write_kv_triton,
    between_attention=between_attention.between_attention_triton,
    pack_layers=layers.pack_layers,
    to_last_attention=layers.to_last_attention_triton,
    after_last_attention=layers.after_last_attention_triton,
    gather_blocks=blocks.gather_blocks_triton,
    scatter_blocks=blocks.scatter_blocks_triton,
    copy_blocks=blocks.copy_blocks_triton,
    sample=sampling.sample_triton,
    kv_dtypes=frozenset({FP8_DTYPE}),
    never_waits=True,
)


def native_kernels() -> Kernels | str:
    """The native CPU kernels, or the reason why they cannot run here."""
    library = native_library.load()
    if isinstance(library, str):
        return library
    return Kernels(
        name="native",
        rms_norm=native.rms_norm,
        rope_write_kv=native.rope_write_kv,
        attention=native.attention,
        schedule_attention=attention.schedule_attention,
        silu_mul=native.silu_mul,
        pack_linear=native.pack_linear,
        packed_rows=native.packed_rows,
        linear=native.linear,
        linear_logits=native.linear_logits,
        linear_argmax=native.linear_argmax,
        linear_add=native.linear_add,
        pack_linear_gated=native.pack_linear_gated,
        linear_silu_mul=native.linear_silu_mul,
        linear_rope_write_kv=native.linear_rope_write_kv,
        between_attention=native.between_attention,
        pack_layers=native_layers.pack_layers,
        to_last_attention=native_layers.to_last_attention,
        after_last_attention=native_layers.after_last_attention,
        gather_blocks=native.gather_blocks,
        scatter_blocks=native.scatter_blocks,
        copy_blocks=native.copy_blocks,
    )


def select_kernels(device: torch.device, *, head_dim: int | None = None) -> Kernels:
    """The kernels for `device` and a model's head size, None before it is known.

    `BATCHLLM_KERNELS` names a backend; one that cannot run raises JobError.
    """
    return _select(device, head_dim)[0]


def why_reference(device: torch.device, *, head_dim: int) -> str:
    """Why `select_kernels` falls back on the reference, many times slower, though nobody asked for it; empty where it does not."""
    return _select(device, head_dim)[1]


def _select(device: torch.device, head_dim: int | None) -> tuple[Kernels, str]:
    asked = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if asked == "reference":
        return REFERENCE, ""
    if asked not in ("", "native", "triton"):
        raise JobError(f"{ENVIRONMENT_VARIABLE}={asked}: no such kernels; use native, triton or reference")
    wants_triton = asked == "triton" or (asked == "" and device.type == "cuda")
    try:
        chosen = _triton_or_reason(device, head_dim) if wants_triton else _native_or_reason(device, head_dim)
    except ValueError as error:
        raise JobError(
            f"{native_library.PATH_VARIABLE}={os.environ.get(native_library.PATH_VARIABLE)}: {error}"
        ) from None
    if isinstance(chosen, Kernels):
        return chosen, ""
    if asked:
        raise JobError(f"{ENVIRONMENT_VARIABLE}={asked}: {chosen}")
    return REFERENCE, chosen


def _triton_or_reason(device: torch.device, head_dim: int | None) -> Kernels | str:
    if not launch.can_run(device):
        needs = "needs a CUDA device" if launch.is_installed() else "needs triton installed"
        return f"{needs}; the job's device is {device}"
    tuned = attention_triton.head_dims(device)
    if head_dim is not None and head_dim not in tuned:
        return f"attention is tuned for head dims {', '.join(map(str, tuned))}, and the model's is {head_dim}"
    return TRITON


def _native_or_reason(device: torch.device, head_dim: int | None) -> Kernels | str:
    """Raises ValueError for a path of instructions that is asked for and cannot run."""
    if device.type != "cpu":
        return f"not for {device.type}"
    if head_dim is not None and (head_dim % 8 or head_dim > native_arguments.MAX_HEAD_DIM):
        return f"head_dim {head_dim} is not a multiple of 8 up to {native_arguments.MAX_HEAD_DIM}"
    return native_kernels()
