"""The operations on CPU tensors, native. Signatures and meaning: the reference functions in `kernels/`.

Each function checks what the C side takes on trust, passes raw pointers and returns. ValueError names a tensor that
does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from batchllm.kernels.attention import AttentionPlan
from batchllm.kernels.between_attention import KvTarget, LayerEnd, LayerStart, RowOperations
from batchllm.kernels.linear import quantise_weight
from batchllm.kernels.native.library import Library, load
from batchllm.kernels.native.memory import empty_in_arena
from batchllm.kernels.native.row_memory import empty_rows

_DATA_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_INT8 = 2
_STORE, _ADD, _SILU_MUL, _, _ARGMAX, _STORE_FLOAT = range(6)
MAX_HEAD_DIM = 256


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


def _library() -> Library:
    library = load()
    if isinstance(library, str):
        raise RuntimeError(f"native kernels: {library}")
    return library


def _data_type(*tensors: torch.Tensor) -> int:
    data_type = _DATA_TYPES.get(tensors[0].dtype)
    if data_type is None or any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise ValueError(
            f"native kernels take float32 or bfloat16, one type a call; got {[tensor.dtype for tensor in tensors]}"
        )
    return data_type


def _require_contiguous(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, has strides {tensor.stride()} for {tuple(tensor.shape)}")


def _require_int32(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name}: must be int32, is {tensor.dtype}")


def _layer_pointer(kv: torch.Tensor, layer: int) -> int:
    """Address of the layer's keys in block 0. Raises ValueError where a block is not contiguous over its layers."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
    head_size = block_size * head_dim
    if kv.stride()[1:] != (2 * num_kv_heads * head_size, num_kv_heads * head_size, head_size, head_dim, 1):
        raise ValueError(f"kv: each block must be contiguous, has strides {kv.stride()} for {tuple(kv.shape)}")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} of a pool of {num_layers}")
    return kv.data_ptr() + layer * kv.stride(1) * kv.element_size()


def _require_no_scale(kv_scale: torch.Tensor | None) -> None:
    if kv_scale is not None:
        raise ValueError("kv_scale: the native kernels keep keys and values as they are")


def attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    _require_no_scale(kv_scale)
    num_rows, num_heads, head_dim = query.shape
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"native attention takes head dims up to {MAX_HEAD_DIM} that 8 divides, not {head_dim}")
    query = query.contiguous()
    out = empty_rows(query.shape, query.dtype)
    _library().attention(
        query.data_ptr(),
        out.data_ptr(),
        _layer_pointer(kv, layer),
        kv.stride(0),
        num_rows,
        _data_type(query, kv),
        num_heads,
        kv.shape[3],
        head_dim,
        kv.shape[4],
        plan.positions.data_ptr(),
        plan.block_table.data_ptr(),
        plan.block_table.shape[1],
        plan.items.data_ptr(),
        plan.items.shape[0],
        plan.merge_rows.data_ptr(),
        plan.merge_start.data_ptr(),
        plan.merge_partials.data_ptr(),
        plan.merge_rows.shape[0],
        plan.num_partials,
        scale,
    )
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    x = x.contiguous()
    out = empty_rows(x.shape, x.dtype)
    if residual is None:
        data_type, residual_pointer = _data_type(x, weight), None
    else:
        _require_contiguous(residual=residual)
        data_type, residual_pointer = _data_type(x, weight, residual), residual.data_ptr()
    size = x.shape[-1]
    _library().rms_norm(
        x.data_ptr(), weight.data_ptr(), residual_pointer, out.data_ptr(), x.numel() // size, size, eps, data_type
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape
    out = empty_rows((num_rows, width // 2), gate_up.dtype)
    _library().silu_mul(gate_up.data_ptr(), out.data_ptr(), num_rows, width // 2, _data_type(gate_up))
    return out


def _rope_arguments(
    cos_sin: torch.Tensor, kv: torch.Tensor, *, layer: int, positions: torch.Tensor, slots: torch.Tensor, num_heads: int
) -> tuple[int, ...]:
    num_kv_heads, block_size, head_dim = kv.shape[3:]
    _require_int32(positions=positions)
    if slots.dtype != torch.int64 or cos_sin.dtype != torch.float32 or cos_sin.shape[1] != head_dim:
        raise ValueError(
            f"slots int64 and cos_sin float32 [n, {head_dim}], not {slots.dtype}, {cos_sin.dtype} {cos_sin.shape}"
        )
    _require_contiguous(cos_sin=cos_sin, positions=positions, slots=slots)
    return (
        cos_sin.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        _layer_pointer(kv, layer),
        kv.stride(0),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
    )


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
    _require_no_scale(kv_scale)
    qkv = qkv.contiguous()
    num_rows = qkv.shape[0]
    query = empty_rows((num_rows, num_heads, kv.shape[5]), qkv.dtype)
    rope = _rope_arguments(cos_sin, kv, layer=layer, positions=positions, slots=slots, num_heads=num_heads)
    _library().rope_write_kv(qkv.data_ptr(), query.data_ptr(), num_rows, _data_type(qkv, kv), *rope)
    return query


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, int8: bool = False) -> NativeLinear:
    """Weight [out_size, in_size] float32 or bfloat16, packed: a copy, with `int8` rounded."""
    packed = _int8_tiles(weight) if int8 else _plain_tiles(weight)
    return NativeLinear(
        weight=packed, bias=_wide_bias(bias, weight.shape[0]), out_size=weight.shape[0], in_size=weight.shape[1]
    )


def _wide_bias(bias: torch.Tensor | None, out_size: int) -> torch.Tensor | None:
    return None if bias is None else torch.nn.functional.pad(bias.float(), (0, -out_size % 16))


def _plain_tiles(weight: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """[tiles, inputs, 16] float32 or [tiles, pairs of inputs, 16, 2] bfloat16; with `gated` the tiles of the two halves in turn."""
    _data_type(weight)
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
    words = packed.weight.view(torch.int32).flatten(2)
    rows = empty_rows((ids.numel(), words.shape[1]), torch.int32)
    # words[ids // 16, :, ids % 16], which takes no memory to write to.
    torch.ops.aten.index.Tensor_out(words, [ids // 16, None, ids % 16], out=rows)
    return rows.view(packed.weight.dtype)[:, : packed.in_size].contiguous()


def _run_linear(x: torch.Tensor, packed: NativeLinear, out: torch.Tensor, end: int) -> torch.Tensor:
    _library().linear(*_linear_arguments(x, packed, out), end)
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
        *((_data_type(x), _INT8) if packed.weight.dtype == torch.int8 else (_data_type(x, packed.weight),) * 2),
    )


def linear(x: torch.Tensor, packed: NativeLinear) -> torch.Tensor:
    return _run_linear(x, packed, empty_rows((x.shape[0], packed.out_size), x.dtype), _STORE)


def linear_logits(x: torch.Tensor, packed: NativeLinear) -> torch.Tensor:
    return _run_linear(x, packed, torch.empty(x.shape[0], packed.out_size), _STORE_FLOAT)


def linear_argmax(x: torch.Tensor, packed: NativeLinear) -> torch.Tensor:
    return _run_linear(x, packed, torch.empty(x.shape[0], dtype=torch.int64), _ARGMAX)


def linear_add(x: torch.Tensor, packed: NativeLinear, residual: torch.Tensor) -> None:
    _require_contiguous(residual=residual)
    _data_type(x, residual)
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
    _require_no_scale(kv_scale)
    head_dim = kv.shape[5]
    # An end sees whole tiles of 16 outputs.
    if head_dim % 16:
        return rope_write_kv(
            linear(x, packed), cos_sin, kv, layer=layer, positions=positions, slots=slots, num_heads=num_heads
        )
    if packed.out_size != (num_heads + 2 * kv.shape[3]) * head_dim:
        raise ValueError(f"weight of {packed.out_size} outputs for {num_heads} + 2 * {kv.shape[3]} heads of {head_dim}")
    _data_type(x, kv)
    query = empty_rows((x.shape[0], num_heads, head_dim), x.dtype)
    rope = _rope_arguments(cos_sin, kv, layer=layer, positions=positions, slots=slots, num_heads=num_heads)
    _library().linear_rope_write_kv(*_linear_arguments(x, packed, query), *rope)
    return query


def between_attention(
    residual: torch.Tensor,
    *,
    eps: float,
    attended: torch.Tensor | None = None,
    end: LayerEnd | None = None,
    start: LayerStart | None = None,
    target: KvTarget | None = None,
) -> torch.Tensor | None:
    if not _goes_through(end, start, target):
        return _OPERATIONS.in_turn(residual, eps=eps, attended=attended, end=end, start=start, target=target)
    _require_contiguous(residual=residual)
    query, data_type = None, _data_type(residual)
    ending: tuple[int | None, ...] = (None, 0, *(None,) * 7, 0)
    starting: tuple[int | None, ...] = (None, None, None, 0, None, *(None,) * 4, 0, 0, 0, 0, 0)
    if end is not None:
        assert attended is not None, "a layer ends with what its attention gave"
        ending = _end_arguments(residual, attended, end)
    if start is not None and target is not None:
        query, starting = _start_arguments(residual, start, target)
    _library().between_attention(
        residual.data_ptr(), residual.shape[0], residual.shape[1], eps, data_type, *ending, *starting
    )
    return query


def _goes_through(end: LayerEnd | None, start: LayerStart | None, target: KvTarget | None) -> bool:
    """Whether rows can go through all products at once: plain weights, whole tiles."""
    products = [] if end is None else [end.output, end.gate_up, end.down]
    if start is not None:
        products.append(start.qkv)
    is_plain = all(product.weight.dtype != torch.int8 for product in products)
    return is_plain and (end is None or end.gate_up.gated) and (target is None or target.kv.shape[5] % 16 == 0)


def _require_fit(name: str, packed: NativeLinear, *, in_size: int, out_size: int) -> None:
    if (packed.in_size, packed.out_size) != (in_size, out_size):
        raise ValueError(
            f"{name}: must have {in_size} inputs and {out_size} outputs, has {packed.in_size} and {packed.out_size}"
        )


def _end_arguments(residual: torch.Tensor, attended: torch.Tensor, end: LayerEnd) -> tuple[int | None, ...]:
    num_rows, size = residual.shape
    _require_contiguous(attended=attended, norm=end.norm)
    if attended.shape != (num_rows, end.output.in_size) or end.norm.shape != (size,):
        raise ValueError(
            f"attended {tuple(attended.shape)} and norm {tuple(end.norm.shape)} do not fit residual {(num_rows, size)} and "
            f"an output of {end.output.in_size} inputs"
        )
    _require_fit("output", end.output, in_size=end.output.in_size, out_size=size)
    _require_fit("gate_up", end.gate_up, in_size=size, out_size=2 * end.down.in_size)
    _require_fit("down", end.down, in_size=end.down.in_size, out_size=size)
    _data_type(residual, attended, end.norm, end.output.weight, end.gate_up.weight, end.down.weight)
    return (
        attended.data_ptr(),
        end.output.in_size,
        *_weight_pointers(end.output),
        end.norm.data_ptr(),
        *_weight_pointers(end.gate_up),
        *_weight_pointers(end.down),
        end.down.in_size,
    )


def _start_arguments(
    residual: torch.Tensor, start: LayerStart, target: KvTarget
) -> tuple[torch.Tensor, tuple[int | None, ...]]:
    _require_no_scale(target.kv_scale)
    num_rows, size = residual.shape
    num_kv_heads, _, head_dim = target.kv.shape[3:]
    num_all = target.num_heads + 2 * num_kv_heads
    _require_contiguous(norm=start.norm)
    if start.norm.shape != (size,) or target.slots.numel() != num_rows or target.positions.numel() != num_rows:
        raise ValueError(
            f"norm {tuple(start.norm.shape)}, {target.slots.numel()} slots and {target.positions.numel()} positions do not fit "
            f"residual {(num_rows, size)}"
        )
    _require_fit("qkv", start.qkv, in_size=size, out_size=num_all * head_dim)
    _data_type(residual, start.norm, start.qkv.weight, target.kv)
    query = empty_rows((num_rows, target.num_heads, head_dim), residual.dtype)
    rope = _rope_arguments(
        target.cos_sin,
        target.kv,
        layer=target.layer,
        positions=target.positions,
        slots=target.slots,
        num_heads=target.num_heads,
    )
    return query, (
        start.norm.data_ptr(),
        *_weight_pointers(start.qkv),
        start.qkv.out_size,
        query.data_ptr(),
        *rope,
    )


def _weight_pointers(packed: NativeLinear) -> tuple[int, int | None]:
    return packed.weight.data_ptr(), None if packed.bias is None else packed.bias.data_ptr()


_OPERATIONS = RowOperations(rms_norm, linear_add, linear_silu_mul, linear_rope_write_kv)


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
    count = max(0 if ids is None else ids.numel() for ids in (target_ids, source_ids))
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
    _library().copy_blocks(
        target.data_ptr(),
        target.stride(0) * target.element_size(),
        None if target_ids is None else target_ids.contiguous().data_ptr(),
        source.data_ptr(),
        source.stride(0) * source.element_size(),
        None if source_ids is None else source_ids.contiguous().data_ptr(),
        count,
        source[0].numel() * source.element_size(),
    )
