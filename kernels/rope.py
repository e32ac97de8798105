"""Rotary position embedding with the write of keys and values into paged blocks.

Rotation in halves (Su et al., arXiv 2104.09864; the layout of the Hugging Face Llama weights): for i < head_dim / 2,

    y[i] = x[i] cos - x[i + half] sin        y[i + half] = x[i + half] cos + x[i] sin

Bound: memory. Computed in float32, rounded once.
"""

from __future__ import annotations

import torch


def rope_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Rotates queries and keys, writes keys and values of `layer` into their slots, returns the queries [num_rows, num_heads, head_dim].

    `qkv` [num_rows, (num_heads + 2 num_kv_heads) * head_dim]: queries, keys, values. `cos_sin` float32 [max_position, head_dim]: cosines,
    then sines, of the head_dim / 2 frequencies. `positions` int32 [num_rows]. `slots` int64 [num_rows]: block * block_size + offset, or
    -1 for a row whose keys and values are already in the pool. `kv`: the pool, as in `attention`.
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
    kv[blocks, layer, 0, :, offsets] = rotated[written, num_heads:].to(kv.dtype)
    kv[blocks, layer, 1, :, offsets] = heads[written, num_heads + num_kv_heads :].to(kv.dtype)
    return rotated[:, :num_heads].contiguous()
