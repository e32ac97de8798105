"""What lies between two attentions, native: one call where rows can go through all products at once, else one operation after the other."""

from __future__ import annotations

import torch

from batchllm.kernels.between_attention import KvTarget, LayerEnd, LayerStart, RowOperations
from batchllm.kernels.native.arguments import (
    data_type_of,
    library,
    require_contiguous,
    require_no_scale,
    rope_arguments,
)
from batchllm.kernels.native.operations import (
    NativeLinear,
    linear_add,
    linear_rope_write_kv,
    linear_silu_mul,
    rms_norm,
)
from batchllm.kernels.native.row_memory import empty_rows

_OPERATIONS = RowOperations(rms_norm, linear_add, linear_silu_mul, linear_rope_write_kv)


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
    require_contiguous(residual=residual)
    query, data_type = None, data_type_of(residual)
    ending: tuple[int | None, ...] = (None, 0, *(None,) * 7, 0)
    starting: tuple[int | None, ...] = (None, None, None, 0, None, *(None,) * 4, 0, 0, 0, 0, 0)
    if end is not None:
        assert attended is not None, "a layer ends with what its attention gave"
        ending = _end_arguments(residual, attended, end)
    if start is not None and target is not None:
        query, starting = _start_arguments(residual, start, target)
    library().between_attention(
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


def require_end(end: LayerEnd, *, size: int, in_size: int) -> None:
    """Raises ValueError where weights do not fit a residual stream of `size`, `in_size` numbers from the attention, or each other."""
    _require_norm(end.norm, size=size)
    _require_fit("output", end.output, in_size=in_size, out_size=size)
    _require_fit("gate_up", end.gate_up, in_size=size, out_size=2 * end.down.in_size)
    _require_fit("down", end.down, in_size=end.down.in_size, out_size=size)


def require_start(start: LayerStart, *, size: int, out_size: int) -> None:
    """Raises ValueError where weights do not fit a residual stream of `size`, or heads of `out_size` numbers in all."""
    _require_norm(start.norm, size=size)
    _require_fit("qkv", start.qkv, in_size=size, out_size=out_size)


def require_rows(target: KvTarget, num_rows: int) -> None:
    if target.slots.numel() != num_rows or target.positions.numel() != num_rows:
        raise ValueError(
            f"{target.slots.numel()} slots and {target.positions.numel()} positions do not fit {num_rows} rows"
        )


def _require_norm(norm: torch.Tensor, *, size: int) -> None:
    require_contiguous(norm=norm)
    if norm.shape != (size,):
        raise ValueError(f"norm {tuple(norm.shape)} does not fit a residual of {size}")


def _require_fit(name: str, packed: NativeLinear, *, in_size: int, out_size: int) -> None:
    if (packed.in_size, packed.out_size) != (in_size, out_size):
        raise ValueError(
            f"{name}: must have {in_size} inputs and {out_size} outputs, has {packed.in_size} and {packed.out_size}"
        )


def _end_arguments(residual: torch.Tensor, attended: torch.Tensor, end: LayerEnd) -> tuple[int | None, ...]:
    num_rows, size = residual.shape
    require_contiguous(attended=attended)
    if attended.shape[0] != num_rows:
        raise ValueError(f"attended {tuple(attended.shape)} does not fit {num_rows} rows")
    require_end(end, size=size, in_size=attended.shape[1])
    data_type_of(residual, attended, end.norm, end.output.weight, end.gate_up.weight, end.down.weight)
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
    require_no_scale(target.kv_scale)
    num_rows, size = residual.shape
    num_kv_heads, _, head_dim = target.kv.shape[3:]
    require_start(start, size=size, out_size=(target.num_heads + 2 * num_kv_heads) * head_dim)
    require_rows(target, num_rows)
    data_type_of(residual, start.norm, start.qkv.weight, target.kv)
    query = empty_rows((num_rows, target.num_heads, head_dim), residual.dtype)
    rope = rope_arguments(
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
