"""Attention over work items, and the merge of their partial results.

A step's query rows, prefill and decode alike, lie flat in `[num_rows, num_heads, head_dim]`. A work item is *these consecutive rows x
this span of KV positions*. Its rows read the same blocks, so a prefix that many sequences share is one item and is read once. Where
they share the front of a chunk only, the item forks: behind the front each row goes on alone, through its own row of the block table.
Row r, at absolute position `positions[r]`, sees the KV positions of the span that are <= positions[r].

Arithmetic. Spans are cut at absolute multiples of `CHUNK` positions. Per chunk c and row, in float32:

    s = scale * q.k   m_c = max(s)   p = exp(s - m_c)   l_c = sum(p)   a_c = p @ v

and chunks are folded in ascending position, each time with the same formula, whether inside an item or by `merge`:

    m = max(m_1, m_2)   w_i = exp(m_i - m)   l = l_1 w_1 + l_2 w_2   a = a_1 w_1 + a_2 w_2        out = a / l

Only an item that starts at position 0 folds its chunks (a left fold needs everything before it); any other item leaves one partial
(a, m, l) a chunk. So a row's bits do not depend on its neighbours, on sharing, on the batch, or on how a prompt was cut. An item that forks
is by its meaning one item a row: a backend reads the front once where that leaves the bits as they are, or treats the rows apart.

Bound: decode by the KV bytes read; prefill by matrix products.

The Triton kernels are in `attention_triton.py`, for length alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

CHUNK = 256
"""Absolute positions at which spans are cut, in tokens."""

_TILE_ROWS = 4
"""Rows of one reference matrix product. The shape is fixed, so that a row's bits do not depend on how many rows an item has."""

_UNITS_PER_BATCH = 64
"""Reference products that run at once: bounds the gathered KV."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of one layer's attention; `dtype` is the query's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one step's attention reads, the same for each layer. All tensors are int32, contiguous, on the pool's device.

    `positions` [num_rows]: absolute position of each query row.
    `block_table` [num_tables, max_blocks]: block ids by position // block_size; -1 where there is none.
    `tables` [num_rows]: the row of `block_table` through which each query row reads.
    `items` [num_items, 6]: row_start, num_rows, kv_start, kv_stop, shared_stop, partial.
        `kv_start` is a multiple of CHUNK. Every row of the item sees at least position kv_start.
        The tables of all its rows name the same blocks for the positions from `kv_start` to `shared_stop`.
        `shared_stop` = `kv_stop`: the rows share all. Every position below is written, seen by a row or not; what the block holds
        behind it is never used, NaN included.
        `shared_stop` < `kv_stop`: the item forks. It lies in one chunk and every row sees position shared_stop; from there on a row
        reads its own blocks, up to its own position or `kv_stop`.
        `partial` -1: the item starts at 0 and holds all that its rows see; it writes the output itself.
        Otherwise row i of the item writes, for its j-th chunk, partial number `partial + j * num_rows + i`; an item that starts
        at 0 folds its chunks and has j = 0 only.
    `merge_rows` [num_merge_rows], `merge_start` [num_merge_rows + 1], `merge_partials`: the rows whose output is merged, and for
        the i-th of them the partial numbers `merge_partials[merge_start[i]:merge_start[i + 1]]`, ascending in position.
        A partial that lies wholly after a row's position was never written and is not listed.
    `last_items` [n, 6]: what the last layer of a model attends, the items of rows whose output is wanted of it; None: `items`. Items that
        leave partials are the same in both. A single layer's attention does not look at them.
    `schedule`: what `schedule_attention` made of `items`, once a step; None where nothing is to be made, or each launch makes its own.

    A step that a CUDA graph replays has tensors of fixed shapes: items of 0 rows, and merge rows without partials, do nothing (the native
    kernels are never given any).
    """

    positions: torch.Tensor
    tables: torch.Tensor
    block_table: torch.Tensor
    items: torch.Tensor
    merge_rows: torch.Tensor
    merge_start: torch.Tensor
    merge_partials: torch.Tensor
    num_partials: int
    last_items: torch.Tensor | None = None
    schedule: torch.Tensor | None = None


def schedule_attention(plan: AttentionPlan, heads: HeadShape) -> AttentionPlan:
    """What all layers of a step can share, made once: the plan itself where a backend walks the items as they are."""
    return plan


def attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one layer: `query` [num_rows, num_heads, head_dim] -> the same shape and dtype.

    `kv` is the block pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], any block stride; keys are index 0.
    Head h reads KV head h // (num_heads // num_kv_heads). Rows in no item come back as zeros.
    `kv_scale` float32 [num_layers, 2, num_kv_heads]: what stored keys and values are multiplied with; None is 1 (see `rope_write_kv`).
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[3]
    group = num_heads // num_kv_heads
    out = torch.zeros_like(query)
    accumulators = torch.empty(plan.num_partials, num_heads, head_dim, device=query.device)
    maxima = torch.empty(plan.num_partials, num_heads, device=query.device)
    sums = torch.empty(plan.num_partials, num_heads, device=query.device)
    # [kv_heads, rows, group, head_dim]: the heads of one KV head share its keys.
    grouped = query.float().reshape(num_rows, num_kv_heads, group, head_dim).permute(1, 0, 2, 3) * scale
    for row_start, item_rows, kv_start, kv_stop, partial in _items_of_shared_blocks(plan):
        rows = torch.arange(row_start, row_start + item_rows, device=query.device)
        table = plan.block_table[int(plan.tables[row_start])]
        running: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        for number, chunk_start in enumerate(range(kv_start, kv_stop, CHUNK)):
            chunk_stop = min(chunk_start + CHUNK, kv_stop)
            keys, values = _gather_chunk(kv, layer, table, chunk_start, chunk_stop)
            if kv_scale is not None:
                keys, values = (side * kv_scale[layer, n, :, None, None] for n, side in enumerate((keys, values)))
            visible = plan.positions[rows] - chunk_start
            result = _chunk_partial(grouped[:, rows], keys, values, visible.clamp(max=chunk_stop - chunk_start - 1))
            if kv_start == 0:
                running = result if running is None else fold(running, result)
            else:
                index = partial + number * item_rows
                _write_partials(accumulators, maxima, sums, index, result)
        if running is not None:
            if partial < 0:
                out[rows] = (running[0] / running[2].unsqueeze(-1)).to(out.dtype)
            else:
                _write_partials(accumulators, maxima, sums, partial, running)
    if plan.merge_rows.numel():
        merge(accumulators, maxima, sums, plan=plan, out=out)
    return out


def _items_of_shared_blocks(plan: AttentionPlan) -> Iterator[tuple[int, int, int, int, int]]:
    """(row_start, num_rows, kv_start, kv_stop, partial) of each item; of one that forks, a row at a time."""
    for row_start, num_rows, kv_start, kv_stop, shared_stop, partial in plan.items.tolist():
        if shared_stop >= kv_stop:
            yield row_start, num_rows, kv_start, kv_stop, partial
            continue
        for row in range(num_rows):
            row_stop = min(kv_stop, int(plan.positions[row_start + row]) + 1)
            yield row_start + row, 1, kv_start, row_stop, partial if partial < 0 else partial + row


def merge(
    accumulators: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, *, plan: AttentionPlan, out: torch.Tensor
) -> None:
    """Folds the partials of `plan.merge_rows` in ascending position and writes their rows of `out`.

    `accumulators` [num_partials, num_heads, head_dim], `maxima` and `sums` [num_partials, num_heads], all float32.
    """
    starts = plan.merge_start.long()
    listed = (starts[1:] > starts[:-1]).nonzero().squeeze(1)
    if listed.numel() == 0:
        return
    starts, counts = starts[listed], (starts[1:] - starts[:-1])[listed]
    first = plan.merge_partials[starts].long()
    running = (accumulators[first], maxima[first], sums[first])
    for number in range(1, int(counts.max())):
        active = (counts > number).nonzero().squeeze(1)
        index = plan.merge_partials[starts[active] + number].long()
        folded = fold(
            (running[0][active], running[1][active], running[2][active]),
            (accumulators[index], maxima[index], sums[index]),
        )
        for whole, part in zip(running, folded, strict=True):
            whole[active] = part
    out[plan.merge_rows[listed].long()] = (running[0] / running[2].unsqueeze(-1)).to(out.dtype)


def fold(
    left: tuple[torch.Tensor, torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two partials (a, m, l) of neighbouring spans as one; a right side that saw nothing (m = -inf) changes no bit of the left."""
    maximum = torch.maximum(left[1], right[1])
    left_weight = torch.exp(left[1] - maximum)
    right_weight = torch.exp(right[1] - maximum)
    return (
        left[0] * left_weight.unsqueeze(-1) + right[0] * right_weight.unsqueeze(-1),
        maximum,
        left[2] * left_weight + right[2] * right_weight,
    )


def _write_partials(
    accumulators: torch.Tensor,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    index: int,
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    stop = index + result[0].shape[0]
    accumulators[index:stop], maxima[index:stop], sums[index:stop] = result


def _gather_chunk(
    kv: torch.Tensor, layer: int, table: torch.Tensor, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions [start, stop) as float32 [num_kv_heads, CHUNK, head_dim], zeros behind stop."""
    block_size = kv.shape[4]
    positions = torch.arange(start, stop, device=kv.device)
    blocks = table[positions // block_size].long()
    # Advanced indices around slices: the token axis comes first, [tokens, kv_heads, head_dim].
    gathered = [kv[blocks, layer, side, :, positions % block_size] for side in (0, 1)]
    padded = torch.zeros(2, kv.shape[3], CHUNK, kv.shape[5], device=kv.device)
    for side in (0, 1):
        padded[side, :, : stop - start] = gathered[side].float().transpose(0, 1)
    return padded[0], padded[1]


def _chunk_partial(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a [rows, heads, head_dim], m [rows, heads], l [rows, heads]) of one chunk.

    `query` [kv_heads, rows, group, head_dim], scaled; `visible` [rows]: the last offset in the chunk that a row sees, negative for none.
    """
    num_kv_heads, num_rows, group, head_dim = query.shape
    num_tiles = -(-num_rows // _TILE_ROWS)
    padded = torch.zeros(num_kv_heads, num_tiles * _TILE_ROWS, group, head_dim, device=query.device)
    padded[:, :num_rows] = query
    tiles = padded.reshape(num_kv_heads, num_tiles, _TILE_ROWS * group, head_dim)
    accumulator = torch.empty_like(tiles)
    maximum = torch.empty(num_kv_heads, num_tiles, _TILE_ROWS * group, device=query.device)
    total = torch.empty_like(maximum)
    limits = torch.full((num_tiles * _TILE_ROWS,), CHUNK - 1, device=query.device)
    limits[:num_rows] = visible
    limits = limits.repeat_interleave(group).reshape(num_tiles, _TILE_ROWS * group, 1)
    hidden = torch.arange(CHUNK, device=query.device) > limits
    for head in range(num_kv_heads):
        for start in range(0, num_tiles, _UNITS_PER_BATCH):
            part = slice(start, min(start + _UNITS_PER_BATCH, num_tiles))
            size = part.stop - part.start
            # A batched product of one fixed shape a tile; a plain matmul would fold the tiles into one product of varying height.
            scores = torch.bmm(tiles[head, part], keys[head].T.expand(size, head_dim, CHUNK))
            scores.masked_fill_(hidden[part], -torch.inf)
            peak = scores.amax(dim=-1)
            weights = torch.exp(scores - peak.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1))
            accumulator[head, part] = torch.bmm(weights, values[head].expand(size, CHUNK, head_dim))
            maximum[head, part] = peak
            total[head, part] = weights.sum(dim=-1)
    rows = (num_kv_heads, num_tiles * _TILE_ROWS, group)
    return (
        accumulator.reshape(*rows, head_dim)[:, :num_rows].permute(1, 0, 2, 3).reshape(num_rows, -1, head_dim),
        maximum.reshape(rows)[:, :num_rows].permute(1, 0, 2).reshape(num_rows, -1),
        total.reshape(rows)[:, :num_rows].permute(1, 0, 2).reshape(num_rows, -1),
    )
