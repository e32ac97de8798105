"""A forward pass, native: one call up to the last attention and one behind it, over weights that were checked and listed once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from batchllm.kernels.attention import AttentionPlan
from batchllm.kernels.between_attention import KvTarget, LayerEnd, LayerStart
from batchllm.kernels.layers import Layer
from batchllm.kernels.native.arguments import (
    INT8,
    data_type_of,
    last_items_arguments,
    library,
    plan_arguments,
    require_contiguous,
    require_head_dim,
    require_no_scale,
    rope_arguments,
)
from batchllm.kernels.native.operations import NativeLinear
from batchllm.kernels.native.row_memory import empty_rows


class _PackedWeight(ctypes.Structure):
    """As in native.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("weight_type", c_int32),
        ("gated", c_int32),
    )


class _LayerWeights(ctypes.Structure):
    """As in native.h."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", _PackedWeight),
        ("output", _PackedWeight),
        ("feed_forward_norm", c_void_p),
        ("gate_up", _PackedWeight),
        ("down", _PackedWeight),
    )


@dataclass(frozen=True, slots=True)
class NativeLayers:
    """Consecutive layers, checked, and the list of where their weights lie, which `layers` keeps there.

    Each layer's sizes: of the residual stream, of the attention's rows, of queries, keys and values together. `gated_size`: the most
    that one gives its `down`. `ungated_size`: the most of a gate and up that lie one behind the other, 0 where none do.
    """

    layers: tuple[Layer, ...]
    weights: ctypes.Array[_LayerWeights]
    size: int
    attended_size: int
    qkv_size: int
    gated_size: int
    ungated_size: int
    has_int8: bool


def pack_layers(layers: Sequence[Layer]) -> NativeLayers:
    """Raises ValueError where weights do not fit each other or those of the first layer."""
    norm, qkv_size, attended_size = layers[0].start.norm, layers[0].start.qkv.out_size, layers[0].end.output.in_size
    data_type, size = data_type_of(norm), norm.numel()

    def packed(product: NativeLinear) -> _PackedWeight:
        is_int8 = product.weight.dtype == torch.int8
        if not is_int8:
            data_type_of(norm, product.weight)
        bias = None if product.bias is None else product.bias.data_ptr()
        weight_type = INT8 if is_int8 else data_type
        return _PackedWeight(
            product.weight.data_ptr(), bias, product.in_size, product.out_size, weight_type, product.gated
        )

    weights = (_LayerWeights * len(layers))()
    for number, layer in enumerate(layers):
        start, end = layer.start, layer.end
        _require_start(start, size=size, out_size=qkv_size)
        _require_end(end, size=size, in_size=attended_size)
        data_type_of(norm, start.norm, end.norm)
        weights[number] = _LayerWeights(
            start.norm.data_ptr(),
            packed(start.qkv),
            packed(end.output),
            end.norm.data_ptr(),
            packed(end.gate_up),
            packed(end.down),
        )
    ends = [layer.end for layer in layers]
    products = [
        product
        for layer in layers
        for product in (layer.start.qkv, layer.end.output, layer.end.gate_up, layer.end.down)
    ]
    return NativeLayers(
        layers=tuple(layers),
        weights=weights,
        size=size,
        attended_size=attended_size,
        qkv_size=qkv_size,
        gated_size=max(end.down.in_size for end in ends),
        ungated_size=max(0 if end.gate_up.gated else end.gate_up.out_size for end in ends),
        has_int8=any(product.weight.dtype == torch.int8 for product in products),
    )


def to_last_attention(
    residual: torch.Tensor,
    layers: NativeLayers,
    *,
    eps: float,
    target: KvTarget,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor | None:
    kv, num_rows, num_layers = target.kv, residual.shape[0], len(layers.layers)
    num_kv_heads, _, head_dim = kv.shape[3:]
    require_no_scale(target.kv_scale)
    require_head_dim(head_dim)
    require_contiguous(residual=residual)
    sizes = (layers.size, layers.attended_size, layers.qkv_size)
    asked = (residual.shape[1], target.num_heads * head_dim, (target.num_heads + 2 * num_kv_heads) * head_dim)
    if sizes != asked:
        raise ValueError(
            f"layers of {sizes} inputs, inputs of output, and outputs of qkv for a residual {tuple(residual.shape)} and "
            f"{target.num_heads} + 2 * {num_kv_heads} heads of {head_dim}"
        )
    if target.layer + num_layers > kv.shape[1]:
        raise ValueError(f"layers {target.layer} to {target.layer + num_layers - 1} of a pool of {kv.shape[1]}")
    data_type = data_type_of(residual, kv, layers.layers[0].start.norm)
    rope = rope_arguments(
        target.cos_sin,
        kv,
        layer=target.layer,
        positions=target.positions,
        slots=target.slots,
        num_heads=target.num_heads,
        num_rows=num_rows,
    )
    query = empty_rows((num_rows, layers.attended_size), residual.dtype)
    attended = empty_rows((num_rows, layers.attended_size), residual.dtype)
    between = _rows_between(layers, num_rows, residual.dtype, head_dim=head_dim)
    library().to_last_attention(
        residual.data_ptr(),
        num_rows,
        layers.size,
        eps,
        data_type,
        layers.weights,
        num_layers,
        query.data_ptr(),
        attended.data_ptr(),
        *_pointers(between),
        kv.stride(1),
        *rope,
        *plan_arguments(plan, num_rows=num_rows),
        *last_items_arguments(plan),
        scale,
    )
    return None if plan.last_items is not None and len(plan.last_items) == 0 else attended


def after_last_attention(
    residual: torch.Tensor,
    attended: torch.Tensor,
    layers: NativeLayers,
    *,
    rows: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    num_rows, num_chosen = residual.shape[0], rows.numel()
    require_contiguous(residual=residual, attended=attended, rows=rows, norm=norm)
    shapes = tuple(residual.shape), tuple(attended.shape), tuple(norm.shape)
    if shapes != ((num_rows, layers.size), (num_rows, layers.attended_size), (layers.size,)):
        raise ValueError(
            f"layers of {layers.size} numbers a row and {layers.attended_size} of attention for residual, attended and norm {shapes}"
        )
    if rows.dtype != torch.int64:
        raise ValueError(f"rows: must be int64, is {rows.dtype}")
    data_type = data_type_of(residual, attended, norm, layers.layers[0].start.norm)
    hidden = empty_rows((num_chosen, layers.size), residual.dtype)
    between = _rows_between(layers, num_chosen, residual.dtype)
    are_rows = library().after_last_attention(
        residual.data_ptr(),
        attended.data_ptr(),
        num_rows,
        layers.size,
        eps,
        data_type,
        ctypes.byref(layers.weights[len(layers.layers) - 1]),
        rows.data_ptr(),
        num_chosen,
        norm.data_ptr(),
        hidden.data_ptr(),
        *_pointers(between),
    )
    if not are_rows:
        raise ValueError(f"rows: must be below {num_rows}, are {rows.tolist()}")
    return hidden


def _rows_between(
    layers: NativeLayers, num_rows: int, dtype: torch.dtype, *, head_dim: int = 16
) -> tuple[torch.Tensor, ...]:
    """Memory for what one operation gives the next, where rows cannot go through all products of a layer at once: normed rows, gated rows,
    and rows of a product before they are gated or turned. None where they can. `head_dim`: of what is turned.
    """
    wide_size = max(layers.ungated_size, layers.qkv_size if head_dim % 16 else 0)
    if not layers.has_int8 and wide_size == 0:
        return ()
    return tuple(empty_rows((num_rows, size), dtype) for size in (layers.size, layers.gated_size, wide_size))


def _pointers(between: tuple[torch.Tensor, ...]) -> tuple[int | None, ...]:
    return tuple(rows.data_ptr() for rows in between) if between else (None, None, None)


def _require_end(end: LayerEnd, *, size: int, in_size: int) -> None:
    """Raises ValueError where weights do not fit a residual stream of `size`, `in_size` numbers from the attention, or each other."""
    _require_norm(end.norm, size=size)
    _require_fit("output", end.output, in_size=in_size, out_size=size)
    _require_fit("gate_up", end.gate_up, in_size=size, out_size=2 * end.down.in_size)
    _require_fit("down", end.down, in_size=end.down.in_size, out_size=size)


def _require_start(start: LayerStart, *, size: int, out_size: int) -> None:
    """Raises ValueError where weights do not fit a residual stream of `size`, or heads of `out_size` numbers in all."""
    _require_norm(start.norm, size=size)
    _require_fit("qkv", start.qkv, in_size=size, out_size=out_size)


def _require_norm(norm: torch.Tensor, *, size: int) -> None:
    require_contiguous(norm=norm)
    if norm.shape != (size,):
        raise ValueError(f"norm {tuple(norm.shape)} does not fit a residual of {size}")


def _require_fit(name: str, packed: NativeLinear, *, in_size: int, out_size: int) -> None:
    if (packed.in_size, packed.out_size) != (in_size, out_size):
        raise ValueError(
            f"{name}: must have {in_size} inputs and {out_size} outputs, has {packed.in_size} and {packed.out_size}"
        )
