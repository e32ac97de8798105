"""The single operations on CPU tensors, native. Signatures and meaning: the reference functions in `kernels/`.

Each function checks the shapes and types that the C side takes on trust (see `arguments`), passes raw pointers and returns. Numbers in
tensors (positions, slots, block ids, the items of a plan) are the caller's to get right, but for those of `copy_blocks` and its kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from batchllm.kernels.attention import AttentionPlan
from batchllm.kernels.between_attention import RowOperations
from batchllm.kernels.linear import quantise_weight
from batchllm.kernels.native.arguments import (
    INT8,
    data_type_of,
    layer_pointer,
    library,
    plan_arguments,
    require_contiguous,
    require_head_dim,
    require_no_scale,
    rope_arguments,
)
from batchllm.kernels.native.memory import empty_in_arena
from batchllm.kernels.native.row_memory import empty_rows

_STORE, _ADD, _SILU_MUL, _, _ARGMAX, _STORE_FLOAT = range(6)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A weight in tiles of 16 outputs: float32 [tiles, in_size, 16], bf16 [tiles, pairs of inputs, 16, 2], or int8
    [tiles, bytes] with each tile's scales in front (see linear_int8.h); float32 bias in tiles.

    `gated`: tiles of gate and up lie in turn.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_size: int
    in_size: int
    gated: bool = False


def attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    require_no_scale(kv_scale)
    num_rows, num_heads, head_dim = query.shape
    require_head_dim(head_dim)
    if kv.shape[5] != head_dim or num_heads % kv.shape[3]:
        raise ValueError(
            f"{num_heads} heads of {head_dim} over keys and values of {kv.shape[3]} heads of {kv.shape[5]}"
        )
    query = query.contiguous()
    out = empty_rows(query.shape, query.dtype)
    library().attention(
        query.data_ptr(),
        out.data_ptr(),
        layer_pointer(kv, layer),
        kv.stride(0),
        num_rows,
        data_type_of(query, kv),
        num_heads,
        kv.shape[3],
        head_dim,
        kv.shape[4],
        *plan_arguments(plan, num_rows=num_rows),
        scale,
    )
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    x = x.contiguous()
    out = empty_rows(x.shape, x.dtype)
    size = x.shape[-1]
    require_contiguous(weight=weight)
    if weight.shape != (size,):
        raise ValueError(f"weight: must have {size} numbers, has {tuple(weight.shape)}")
    if residual is None:
        data_type, residual_pointer = data_type_of(x, weight), None
    else:
        require_contiguous(residual=residual)
        if residual.shape != x.shape:
            raise ValueError(f"residual: must be {tuple(x.shape)}, is {tuple(residual.shape)}")
        data_type, residual_pointer = data_type_of(x, weight, residual), residual.data_ptr()
    library().rms_norm(
        x.data_ptr(), weight.data_ptr(), residual_pointer, out.data_ptr(), x.numel() // size, size, eps, data_type
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up: must have two halves, has {width} numbers a row")
    out = empty_rows((num_rows, width // 2), gate_up.dtype)
    library().silu_mul(gate_up.data_ptr(), out.data_ptr(), num_rows, width // 2, data_type_of(gate_up))
    return out


def rope_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    require_no_scale(kv_scale)
    qkv = qkv.contiguous()
    num_rows = qkv.shape[0]
    if qkv.shape[1] != (num_heads + 2 * kv.shape[3]) * kv.shape[5]:
        raise ValueError(f"qkv: {qkv.shape[1]} numbers for {num_heads} + 2 * {kv.shape[3]} heads of {kv.shape[5]}")
    query = empty_rows((num_rows, num_heads, kv.shape[5]), qkv.dtype)
    rope = rope_arguments(
        cos_sin, kv, layer=layer, positions=positions, slots=slots, num_heads=num_heads, num_rows=num_rows
    )
    library().rope_write_kv(qkv.data_ptr(), query.data_ptr(), num_rows, data_type_of(qkv, kv), *rope)
    return query


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, int8: bool = False) -> NativeLinear:
    """Weight [out_size, in_size] float32 or bfloat16, packed: a copy, with `int8` rounded. Raises ValueError for one without numbers."""
    _require_numbers(weight)
    packed = _int8_tiles(weight) if int8 else _plain_tiles(weight)
    return NativeLinear(
        weight=packed, bias=_wide_bias(bias, weight.shape[0]), out_size=weight.shape[0], in_size=weight.shape[1]
    )


def _require_numbers(weight: torch.Tensor) -> None:
    if weight.numel() == 0:
        raise ValueError(f"weight: must have outputs and inputs, is {tuple(weight.shape)}")


def _wide_bias(bias: torch.Tensor | None, out_size: int) -> torch.Tensor | None:
    if bias is None:
        return None
    if bias.shape != (out_size,):
        raise ValueError(f"bias: must have {out_size} numbers, has {tuple(bias.shape)}")
    return torch.nn.functional.pad(bias.float(), (0, -out_size % 16))


def _plain_tiles(weight: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """[tiles, inputs, 16] float32 or [tiles, pairs of inputs, 16, 2] bfloat16; with `gated` the tiles of the two halves in turn."""
    data_type_of(weight)
    out_size, in_size = weight.shape
    num_tiles = -(-out_size // 16)
    per_word = torch.float32.itemsize // weight.dtype.itemsize
    padded_in = -(-in_size // 32) * 32 if per_word > 1 else in_size
    if (num_tiles * 16, padded_in) != weight.shape:
        weight = torch.nn.functional.pad(weight, (0, padded_in - in_size, 0, num_tiles * 16 - out_size))
    # Pairs of bfloat16 stay together, and moving them as one word is three times as fast.
    tiles = weight.contiguous().view(torch.int32).view(num_tiles, 16, padded_in // per_word)
    if gated:
        tiles = tiles.unflatten(0, (2, num_tiles // 2)).transpose(0, 1)
    shape = (num_tiles, padded_in // per_word, 16)
    packed = empty_in_arena(shape if per_word == 1 else (*shape, per_word), weight.dtype)
    packed.view(torch.int32).view(*tiles.shape[:-2], *shape[1:]).copy_(tiles.transpose(-1, -2))
    return packed


def _int8_tiles(weight: torch.Tensor) -> torch.Tensor:
    """int8 [tiles, bytes]: a tile's 16 float32 scales, 16 int32 sums of 128 times its weights, its weights by four inputs."""
    out_size, in_size = weight.shape
    num_tiles, padded_in = -(-out_size // 16), -(-in_size // 64) * 64
    rounded, scale = quantise_weight(weight, dtype=torch.int8)
    padded = torch.nn.functional.pad(rounded, (0, padded_in - in_size, 0, num_tiles * 16 - out_size))
    packed = empty_in_arena((num_tiles, 128 + 16 * padded_in), torch.int8)
    scales = torch.nn.functional.pad(scale, (0, num_tiles * 16 - out_size))
    packed[:, :64] = scales.view(num_tiles, 16).view(torch.int8)
    packed[:, 64:128] = (padded.sum(dim=1, dtype=torch.int32) * 128).view(num_tiles, 16).view(torch.int8)
    tiles = packed[:, 128:].unflatten(1, (padded_in // 4, 16, 4))
    tiles.copy_(padded.view(num_tiles, 16, padded_in // 4, 4).permute(0, 2, 1, 3))
    return packed


def pack_linear_gated(weight: torch.Tensor, bias: torch.Tensor | None = None, *, int8: bool = False) -> NativeLinear:
    _require_numbers(weight)
    size = weight.shape[0] // 2
    if size % 16:
        return pack_linear(weight, bias, int8=int8)
    order = torch.arange(2 * size).view(2, size // 16, 16).transpose(0, 1).flatten()
    ordered = None if bias is None else bias[order]
    if int8:
        return replace(pack_linear(weight[order], ordered, int8=True), gated=True)
    return NativeLinear(
        weight=_plain_tiles(weight, gated=True),
        bias=_wide_bias(ordered, 2 * size),
        out_size=2 * size,
        in_size=weight.shape[1],
        gated=True,
    )


def packed_rows(packed: NativeLinear, ids: torch.Tensor) -> torch.Tensor:
    """Each row lies in words of four bytes, 64 apart: a token takes the reading of its tile, 18 KB for 576 inputs of bfloat16."""
    if packed.gated or packed.weight.dtype == torch.int8:
        raise ValueError("rows are read from plain weights only")
    if ids.dtype != torch.int64:
        raise ValueError(f"ids: must be int64, are {ids.dtype}")
    require_contiguous(ids=ids)
    num_words = packed.weight.shape[1]
    rows = empty_rows((ids.numel(), num_words), torch.int32)
    are_rows = library().packed_rows(
        packed.weight.data_ptr(), rows.data_ptr(), ids.data_ptr(), ids.numel(), packed.out_size, num_words
    )
    if not are_rows:
        raise ValueError(f"ids: must be below {packed.out_size}, are {int(ids.min())} to {int(ids.max())}")
    rows = rows.view(packed.weight.dtype)
    return rows if rows.shape[1] == packed.in_size else rows[:, : packed.in_size].contiguous()


def _run_linear(x: torch.Tensor, packed: NativeLinear, out: torch.Tensor, end: int) -> torch.Tensor:
    library().linear(*_linear_arguments(x, packed, out), end)
    return out


def _linear_arguments(x: torch.Tensor, packed: NativeLinear, out: torch.Tensor) -> tuple[int | None, ...]:
    if x.ndim != 2 or x.shape[1] != packed.in_size or (x.shape[0] and x.stride(1) != 1):
        raise ValueError(
            f"x must be [num_rows, {packed.in_size}] with contiguous rows, is {tuple(x.shape)} {x.stride()}"
        )
    return (
        x.data_ptr(),
        packed.weight.data_ptr(),
        None if packed.bias is None else packed.bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        packed.in_size,
        packed.out_size,
        x.stride(0),
        *((data_type_of(x), INT8) if packed.weight.dtype == torch.int8 else (data_type_of(x, packed.weight),) * 2),
    )


def linear(x: torch.Tensor, packed: NativeLinear) -> torch.Tensor:
    return _run_linear(x, packed, empty_rows((x.shape[0], packed.out_size), x.dtype), _STORE)


def linear_logits(x: torch.Tensor, packed: NativeLinear) -> torch.Tensor:
    return _run_linear(x, packed, torch.empty(x.shape[0], packed.out_size, dtype=torch.float32), _STORE_FLOAT)


def linear_argmax(x: torch.Tensor, packed: NativeLinear) -> torch.Tensor:
    # torch.empty takes ten times as long where the caches hold rows.
    return _run_linear(x, packed, torch.from_numpy(np.empty(x.shape[0], dtype=np.int64)), _ARGMAX)


def linear_add(x: torch.Tensor, packed: NativeLinear, residual: torch.Tensor) -> None:
    require_contiguous(residual=residual)
    data_type_of(x, residual)
    if residual.shape != (x.shape[0], packed.out_size):
        raise ValueError(f"residual must be {(x.shape[0], packed.out_size)}, is {tuple(residual.shape)}")
    _run_linear(x, packed, residual, _ADD)


def linear_silu_mul(x: torch.Tensor, packed: NativeLinear) -> torch.Tensor:
    if not packed.gated:
        return silu_mul(linear(x, packed))
    return _run_linear(x, packed, empty_rows((x.shape[0], packed.out_size // 2), x.dtype), _SILU_MUL)


def linear_rope_write_kv(
    x: torch.Tensor,
    packed: NativeLinear,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    require_no_scale(kv_scale)
    head_dim = kv.shape[5]
    # An end sees whole tiles of 16 outputs.
    if head_dim % 16:
        return rope_write_kv(
            linear(x, packed), cos_sin, kv, layer=layer, positions=positions, slots=slots, num_heads=num_heads
        )
    if packed.out_size != (num_heads + 2 * kv.shape[3]) * head_dim:
        raise ValueError(f"weight of {packed.out_size} outputs for {num_heads} + 2 * {kv.shape[3]} heads of {head_dim}")
    data_type_of(x, kv)
    num_rows = x.shape[0]
    query = empty_rows((num_rows, num_heads, head_dim), x.dtype)
    rope = rope_arguments(
        cos_sin, kv, layer=layer, positions=positions, slots=slots, num_heads=num_heads, num_rows=num_rows
    )
    library().linear_rope_write_kv(*_linear_arguments(x, packed, query), *rope)
    return query


between_attention = RowOperations(rms_norm, linear_add, linear_silu_mul, linear_rope_write_kv).in_turn
"""One operation after the other; `to_last_attention` takes rows through all of them at once, with the same bits."""


def gather_blocks(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    _copy_blocks(staging, None, kv, block_ids)


def scatter_blocks(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    _copy_blocks(kv, block_ids, staging, None)


def copy_blocks(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    _copy_blocks(kv, targets, kv, sources)


def _copy_blocks(
    target: torch.Tensor, target_ids: torch.Tensor | None, source: torch.Tensor, source_ids: torch.Tensor | None
) -> None:
    """Copies one block an id; on the side without ids the blocks lie in order from 0."""
    given = [ids for ids in (target_ids, source_ids) if ids is not None]
    count = given[0].numel()
    if any(ids.numel() != count for ids in given):
        raise ValueError(f"{given[1].numel()} blocks into {count}")
    if count == 0:
        return
    for tensor, ids in ((target, target_ids), (source, source_ids)):
        if tensor.dtype != source.dtype or tensor.shape[1:] != source.shape[1:] or not tensor[0].is_contiguous():
            raise ValueError(
                f"blocks must be contiguous and alike, not {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
            )
        if ids is None:
            if tensor.shape[0] < count:
                raise ValueError(f"staging of {tensor.shape[0]} blocks for {count}")
        elif ids.dtype != torch.int64 or int(ids.min()) < 0 or int(ids.max()) >= tensor.shape[0]:
            raise ValueError(f"block ids must be int64 below {tensor.shape[0]}")
    # Held by name until the call is over: a copy that nobody holds is gone before.
    target_ids, source_ids = (None if ids is None else ids.contiguous() for ids in (target_ids, source_ids))
    library().copy_blocks(
        target.data_ptr(),
        target.stride(0) * target.element_size(),
        None if target_ids is None else target_ids.data_ptr(),
        source.data_ptr(),
        source.stride(0) * source.element_size(),
        None if source_ids is None else source_ids.data_ptr(),
        count,
        source[0].numel() * source.element_size(),
    )
