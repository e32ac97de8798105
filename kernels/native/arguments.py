"""What the C side takes on trust, shapes and types checked and in its order. ValueError names a tensor that does not fit."""

from __future__ import annotations

import torch

from batchllm.kernels.attention import AttentionPlan
from batchllm.kernels.native.library import Library, load

INT8 = 2
_DATA_TYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 256
_PLAN_TENSORS = ("positions", "tables", "block_table", "items", "merge_rows", "merge_start", "merge_partials")


def library() -> Library:
    loaded = load()
    if isinstance(loaded, str):
        raise RuntimeError(f"native kernels: {loaded}")
    return loaded


def data_type_of(*tensors: torch.Tensor) -> int:
    """The number of the tensors' one type."""
    number = _DATA_TYPES.get(tensors[0].dtype)
    if number is None or any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise ValueError(
            f"native kernels take float32 or bfloat16, one type a call; got {[tensor.dtype for tensor in tensors]}"
        )
    return number


def require_contiguous(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, has strides {tensor.stride()} for {tuple(tensor.shape)}")


def require_no_scale(kv_scale: torch.Tensor | None) -> None:
    if kv_scale is not None:
        raise ValueError("kv_scale: the native kernels keep keys and values as they are")


def require_head_dim(head_dim: int) -> None:
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"native attention takes head dims up to {MAX_HEAD_DIM} that 8 divides, not {head_dim}")


def layer_pointer(kv: torch.Tensor, layer: int) -> int:
    """Address of the layer's keys in block 0. Raises ValueError where a block is not contiguous over its layers."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
    head_size = block_size * head_dim
    if kv.stride()[1:] != (2 * num_kv_heads * head_size, num_kv_heads * head_size, head_size, head_dim, 1):
        raise ValueError(f"kv: each block must be contiguous, has strides {kv.stride()} for {tuple(kv.shape)}")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} of a pool of {num_layers}")
    return kv.data_ptr() + layer * kv.stride(1) * kv.element_size()


def rope_arguments(
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    num_rows: int,
) -> tuple[int, ...]:
    num_kv_heads, block_size, head_dim = kv.shape[3:]
    if slots.numel() != num_rows or positions.numel() != num_rows:
        raise ValueError(f"{slots.numel()} slots and {positions.numel()} positions do not fit {num_rows} rows")
    if positions.dtype != torch.int32:
        raise ValueError(f"positions: must be int32, is {positions.dtype}")
    if slots.dtype != torch.int64 or cos_sin.dtype != torch.float32 or cos_sin.shape[1] != head_dim:
        raise ValueError(
            f"slots int64 and cos_sin float32 [n, {head_dim}], not {slots.dtype}, {cos_sin.dtype} {cos_sin.shape}"
        )
    require_contiguous(cos_sin=cos_sin, positions=positions, slots=slots)
    return (
        cos_sin.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        layer_pointer(kv, layer),
        kv.stride(0),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
    )


def plan_arguments(plan: AttentionPlan, *, num_rows: int) -> tuple[int, ...]:
    for name in _PLAN_TENSORS:
        _require_plan_tensor(name, getattr(plan, name))
    # Plans of more rows are taken for their first ones.
    if plan.positions.numel() < num_rows or plan.tables.numel() < num_rows or plan.items.shape[1:] != (6,):
        raise ValueError(
            f"plan: {plan.positions.numel()} positions, {plan.tables.numel()} tables and items {tuple(plan.items.shape)} for {num_rows} rows"
        )
    return (
        plan.positions.data_ptr(),
        plan.tables.data_ptr(),
        plan.block_table.data_ptr(),
        plan.block_table.shape[1],
        plan.items.data_ptr(),
        plan.items.shape[0],
        plan.merge_rows.data_ptr(),
        plan.merge_start.data_ptr(),
        plan.merge_partials.data_ptr(),
        plan.merge_rows.shape[0],
        plan.num_partials,
    )


def last_items_arguments(plan: AttentionPlan) -> tuple[int | None, int]:
    """-1 of them where the last layer attends what the others do."""
    items = plan.last_items
    if items is None:
        return None, -1
    _require_plan_tensor("last_items", items)
    if items.shape[1:] != (6,):
        raise ValueError(f"plan: last_items must be [n, 6], is {tuple(items.shape)}")
    return items.data_ptr(), items.shape[0]


def _require_plan_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise ValueError(f"plan: {name} must be int32 and contiguous, is {tensor.dtype} {tensor.stride()}")
