"""Rotary position embedding with the write of keys and values into paged blocks.

Rotation in halves (Su et al., arXiv 2104.09864; the layout of the Hugging Face Llama weights): for i < head_dim / 2,

    y[i] = x[i] cos - x[i + half] sin        y[i + half] = x[i + half] cos + x[i] sin

Bound: memory. Computed in float32, rounded once.

8-bit KV: with a pool of e4m3 (`floats.py`) a key or value is stored as `value / kv_scale`, saturated at +-448.

On a GPU a program takes the heads of one row, a few at a time: it reads their two halves once and writes each to
where it belongs.
"""

from __future__ import annotations

import torch

from batchllm.kernels.floats import E4M3_MAX, FP8_DTYPE, as_bytes, encode_e4m3
from batchllm.kernels.launch import jit, launch, next_power_of_2, tl
from batchllm.kernels.tuning import exact_config, launch_options


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
    """Rotates queries and keys, writes keys and values of `layer` into their slots, returns the queries [num_rows,
    num_heads, head_dim].

    `qkv` [num_rows, (num_heads + 2 num_kv_heads) * head_dim]: queries, keys, values. `cos_sin` float32 [max_position,
    head_dim]: cosines,
    then sines, of the head_dim / 2 frequencies. `positions` int32 [num_rows]. `slots` int64 [num_rows]: block *
    block_size + offset, or
    -1 for a row whose keys and values are already in the pool. `kv`: the pool, as in `attention`.
    `kv_scale` float32 [num_layers, 2, num_kv_heads]: keys and values are stored divided by it; None is 1.
    """
    num_rows = qkv.shape[0]
    num_kv_heads, block_size, head_dim = kv.shape[3:]
    heads = qkv.view(num_rows, num_heads + 2 * num_kv_heads, head_dim)
    table = cos_sin[positions.long()].unsqueeze(1)
    cos, sin = table.chunk(2, dim=-1)
    first, second = heads[:, : num_heads + num_kv_heads].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
    written = (slots >= 0).nonzero().squeeze(1)
    blocks, offsets = slots[written] // block_size, slots[written] % block_size
    keys, values = rotated[written, num_heads:], heads[written, num_heads + num_kv_heads :]
    for side, stored in enumerate((keys, values)):
        if kv_scale is not None:
            stored = stored.float() / kv_scale[layer, side, :, None]
        if kv.dtype == FP8_DTYPE:
            stored = stored.float().clamp(-E4M3_MAX, E4M3_MAX)
        kv[blocks, layer, side, :, offsets] = stored.to(kv.dtype)
    return rotated[:, :num_heads].contiguous()


@jit(do_not_specialize=["layer"])
def _rope_write_kv_kernel(
    qkv: tl.tensor,
    cos_sin: tl.tensor,
    kv: tl.tensor,
    kv_scale: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    query: tl.tensor,
    layer: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_KV_SCALE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS))[:, None]
    dim = tl.arange(0, PADDED_HALF)
    in_half = dim < HALF
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half[None, :]
    source = qkv + row * row_stride + head * HEAD_DIM + dim[None, :]
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    angle = cos_sin + tl.load(positions + row).to(tl.int64) * HEAD_DIM + dim
    cos = tl.load(angle, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=in_half, other=0.0)[None, :]
    wide, wide_second = first.to(tl.float32), second.to(tl.float32)
    turned = head < NUM_HEADS + NUM_KV_HEADS
    first = tl.where(turned, (wide * cos - wide_second * sin).to(first.dtype), first)
    second = tl.where(turned, (wide_second * cos + wide * sin).to(second.dtype), second)

    is_query = mask & (head < NUM_HEADS)
    target = query + (row * NUM_HEADS + head) * HEAD_DIM + dim[None, :]
    tl.store(target, first, mask=is_query)
    tl.store(target + HALF, second, mask=is_query)

    slot = tl.load(slots + row)
    is_kv = mask & (head >= NUM_HEADS) & (slot + 0 * head >= 0)
    # Keys and values of a layer are neighbours in the pool, so the number behind the query heads is side *
    # NUM_KV_HEADS + head.
    side_head = layer * (2 * NUM_KV_HEADS) + (head - NUM_HEADS)
    target = kv + (slot // BLOCK_SIZE) * block_stride + side_head.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
    target += (slot % BLOCK_SIZE) * HEAD_DIM + dim[None, :]
    stored = first.to(tl.float32)
    stored_second = second.to(tl.float32)
    if HAS_KV_SCALE:
        has_scale = (head >= NUM_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
        divisor = tl.load(kv_scale + side_head, mask=has_scale, other=1.0)
        stored = stored / divisor
        stored_second = stored_second / divisor
    if kv.dtype.element_ty == tl.uint8:
        tl.store(target, encode_e4m3(stored), mask=is_kv)
        tl.store(target + HALF, encode_e4m3(stored_second), mask=is_kv)
    else:
        tl.store(target, stored.to(kv.dtype.element_ty), mask=is_kv)
        tl.store(target + HALF, stored_second.to(kv.dtype.element_ty), mask=is_kv)


def rope_write_kv_triton(
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
    """`rope_write_kv` on a GPU."""
    num_rows = qkv.shape[0]
    num_kv_heads, block_size, head_dim = kv.shape[3:]
    query = torch.empty(num_rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    config = exact_config("rope_write_kv", "any", qkv.device)
    launch(
        _rope_write_kv_kernel,
        (num_rows, -(-(num_heads + 2 * num_kv_heads) // config["tile_heads"])),
        device=qkv.device,
        arguments={
            "qkv": qkv,
            "cos_sin": cos_sin,
            "kv": as_bytes(kv),
            "kv_scale": kv_scale,
            "positions": positions,
            "slots": slots,
            "query": query,
            "layer": layer,
            "row_stride": qkv.stride(0),
            "block_stride": kv.stride(0),
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "HAS_KV_SCALE": kv_scale is not None,
            "TILE_HEADS": config["tile_heads"],
            "PADDED_HALF": next_power_of_2(head_dim // 2),
        },
        options=launch_options(config),
    )
    return query
