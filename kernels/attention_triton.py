"""Attention over work items, and the merge of their partials, in Triton. Meaning and arithmetic: `attention.py`.

A unit of work is (item, KV head, tile of query rows), and for an item that leaves partials (..., chunk). The query
heads of one KV head lie side by side in a tile, so each key and value is read once for all of them. A persistent grid
takes units off a ticket, so one launch of a fixed shape serves every item of a step, whatever its size.

All items of a head dimension share one configuration, so the sums of a row go the same way however many rows its item
has. 64 rows are more than a decode row needs, but a decode tile waits for its KV bytes: 32 KiB take about 1 us of one
processor's share of an H200's bandwidth, the 64-row products 0.35 us of its matrix rate. Key tiles divide CHUNK. A
stage of the pipeline holds the block ids, one holds the keys and values that they lead to.

Head dimensions 80 and 96 are worked on as 64 + 16 and 64 + 32 instead of padded to 128. 8-bit KV is widened to the
query's type, exactly, and accumulated in float32: the 8-bit tensor-core product of compute capability 9.0 keeps too few
bits over long sums. Scores are counted in powers of two (times log2 e, then exp2), and so are the maxima of the
partials between the two kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from batchllm.kernels.attention import CHUNK, AttentionPlan, HeadShape
from batchllm.kernels.floats import as_kernel_operand, product, widen
from batchllm.kernels.launch import jit, launch, next_power_of_2, tl
from batchllm.kernels.tuning import Config, exact_config, launch_options, num_processors, shape_classes

_LOG2_E = 1.4426950408889634


def schedule_attention_triton(plan: AttentionPlan, heads: HeadShape) -> AttentionPlan:
    """`schedule_attention` on a GPU: the plan with the units of its items, int32 [2 + num_items + 1].

    Two tickets (next unit, programs done; the kernel leaves them at 0), then each item's first unit, then their
    number. Enqueues one small kernel and does not wait for the device.
    """
    device = plan.items.device
    num_items = plan.items.shape[0]
    schedule = torch.empty(2 + num_items + 1, dtype=torch.int32, device=device)
    launch(
        _schedule_kernel,
        (1,),
        device=device,
        arguments={
            "items": plan.items,
            "schedule": schedule,
            "num_items": num_items,
            "NUM_KV_HEADS": heads.num_kv_heads,
            "GROUP": heads.num_heads // heads.num_kv_heads,
            "TILE_ROWS": _config(heads.dtype, heads.head_dim, device)["tile_rows"],
            "CHUNK": CHUNK,
            "BLOCK": 1024,
        },
        options={"num_warps": 4},
    )
    return replace(plan, schedule=schedule)


@jit(do_not_specialize=["num_items"])
def _schedule_kernel(
    items: tl.tensor,
    schedule: tl.tensor,
    num_items: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    num_units = num_items * 0
    for first in range(0, num_items, BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = index < num_items
        num_rows = tl.load(items + index * 6 + 1, mask=mask, other=0)
        kv_start = tl.load(items + index * 6 + 2, mask=mask, other=0)
        kv_stop = tl.load(items + index * 6 + 3, mask=mask, other=0)
        shared_stop = tl.load(items + index * 6 + 4, mask=mask, other=0)
        # A fold goes from left to right, so an item that folds is one unit however long it is.
        splits = tl.where(kv_start == 0, 1, tl.cdiv(kv_stop - kv_start, CHUNK))
        tiles = tl.cdiv(num_rows * GROUP, TILE_ROWS)
        tiles = tl.where(shared_stop < kv_stop, num_rows * tl.cdiv(GROUP, TILE_ROWS), tiles)
        units = tiles * splits * NUM_KV_HEADS
        units = tl.where((num_rows > 0) & (kv_stop > kv_start), units, 0)
        tl.store(schedule + 2 + index, num_units + tl.cumsum(units, 0) - units, mask=mask)
        num_units += tl.sum(units, 0)
    tl.store(schedule + 2 + num_items, num_units)
    tl.store(schedule, 0)
    tl.store(schedule + 1, 0)


@jit()
def _fold(
    left_acc: tl.tensor,
    left_peak: tl.tensor,
    left_total: tl.tensor,
    right_acc: tl.tensor,
    right_peak: tl.tensor,
    right_total: tl.tensor,
) -> Any:
    """`fold`, with fused multiply-adds spelt out: the compiler must not choose them differently in the two kernels
    that fold."""
    maximum = tl.maximum(left_peak, right_peak)
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    left = tl.exp2(left_peak - finite)
    right = tl.exp2(right_peak - finite)
    acc = tl.fma(left_acc, left[:, None], right_acc * right[:, None])
    return acc, maximum, tl.fma(left_total, left, right_total * right)


@jit(do_not_specialize=["layer", "num_items", "table_stride"])
def _attention_kernel(
    query: tl.tensor,
    kv: tl.tensor,
    kv_scale: tl.tensor,
    positions: tl.tensor,
    tables: tl.tensor,
    block_table: tl.tensor,
    items: tl.tensor,
    schedule: tl.tensor,
    accumulators: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    layer: tl.tensor,
    num_items: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    score_scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_REST: tl.constexpr,
    HAS_KV_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
) -> None:
    HEAD_DIM: tl.constexpr = DIM + DIM_REST
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    dims = tl.arange(0, DIM)
    num_units = tl.load(schedule + 2 + num_items)
    unit = tl.atomic_add(schedule, 1)
    while unit < num_units:
        # The last item whose first unit is not behind this one.
        low = unit * 0
        high = num_items
        while high - low > 1:
            middle = (low + high) // 2
            before = tl.load(schedule + 2 + middle) <= unit
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        local = unit - tl.load(schedule + 2 + low)
        item = items + low * 6
        row_start = tl.load(item)
        num_rows = tl.load(item + 1)
        kv_start = tl.load(item + 2)
        kv_stop = tl.load(item + 3)
        partial = tl.load(item + 5)
        # Tiles of one head are neighbours: they run at the same time and share their keys in the cache. So do the rows of
        # an item that forks, each in tiles of its own.
        forks = tl.load(item + 4) < kv_stop
        row_tiles = tl.cdiv(GROUP, TILE_ROWS)
        num_tiles = tl.where(forks, num_rows * row_tiles, tl.cdiv(num_rows * GROUP, TILE_ROWS))
        tile = local % num_tiles
        first_row = tl.where(forks, tile // row_tiles, 0)
        tile = tl.where(forks, tile % row_tiles, tile)
        row_start += first_row
        partial = tl.where(partial < 0, partial, partial + first_row)
        table = block_table + tl.load(tables + row_start).to(tl.int64) * table_stride
        head = (local // num_tiles) % NUM_KV_HEADS
        split = local // (num_tiles * NUM_KV_HEADS)

        flat = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        valid = flat < tl.where(forks, 1, num_rows) * GROUP
        row = flat // GROUP
        query_head = head * GROUP + flat % GROUP
        position = tl.load(positions + row_start + row, mask=valid, other=-1)
        last = tl.minimum(position, kv_stop - 1)
        query_offset = ((row_start + row).to(tl.int64) * NUM_HEADS + query_head) * HEAD_DIM
        q = tl.load(query + query_offset[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
        begin = kv_start + split * CHUNK
        stop = tl.max(last, 0) + 1
        if kv_start > 0:
            stop = tl.minimum(stop, begin + CHUNK)

        keys = kv + ((layer.to(tl.int64) * 2) * NUM_KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM)
        values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        score = score_scale
        value_scale = 1.0
        if HAS_KV_SCALE:
            score = score_scale * tl.load(kv_scale + (layer * 2) * NUM_KV_HEADS + head)
            value_scale = tl.load(kv_scale + (layer * 2 + 1) * NUM_KV_HEADS + head)

        # `acc`, `peak`, `total`: the fold so far; `chunk_*`: the chunk at hand.
        peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        acc = tl.zeros([TILE_ROWS, DIM], tl.float32)
        chunk_peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        chunk_total = tl.zeros([TILE_ROWS], tl.float32)
        chunk_acc = tl.zeros([TILE_ROWS, DIM], tl.float32)
        if DIM_REST > 0:
            rest = DIM + tl.arange(0, DIM_REST)
            q_rest = tl.load(query + query_offset[:, None] + rest[None, :], mask=valid[:, None], other=0.0)
            acc_rest = tl.zeros([TILE_ROWS, DIM_REST], tl.float32)
            chunk_rest = tl.zeros([TILE_ROWS, DIM_REST], tl.float32)

        for start in range(begin, stop, TILE_KEYS):
            key = start + tl.arange(0, TILE_KEYS)
            # Slots that no row sees may hold anything, NaN too, and a weight of 0 would not remove that from the sum.
            written = key < stop
            block = tl.load(table + key // BLOCK_SIZE, mask=written, other=0)
            slot = block.to(tl.int64) * block_stride + (key % BLOCK_SIZE) * HEAD_DIM
            k = widen(tl.load(keys + slot[:, None] + dims[None, :], mask=written[:, None], other=0.0), q.dtype)
            s = product(q, tl.trans(k), tl.zeros([TILE_ROWS, TILE_KEYS], tl.float32))
            if DIM_REST > 0:
                k = widen(tl.load(keys + slot[:, None] + rest[None, :], mask=written[:, None], other=0.0), q.dtype)
                s = product(q_rest, tl.trans(k), s)
            s = tl.where(key[None, :] <= last[:, None], s * score, float("-inf"))
            # A new chunk starts from -inf, so `shrink` is 0 and wipes out the sums of the one before.
            chunk_peak = tl.where(start % CHUNK == 0, float("-inf"), chunk_peak)
            top = tl.maximum(chunk_peak, tl.max(s, 1))
            finite = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(s - finite[:, None])
            shrink = tl.exp2(chunk_peak - finite)
            chunk_peak = top
            chunk_total = tl.fma(chunk_total, shrink, tl.sum(p, 1))
            p = p.to(q.dtype)
            v = widen(tl.load(values + slot[:, None] + dims[None, :], mask=written[:, None], other=0.0), q.dtype)
            chunk_acc = product(p, v, chunk_acc * shrink[:, None])
            if DIM_REST > 0:
                v = widen(tl.load(values + slot[:, None] + rest[None, :], mask=written[:, None], other=0.0), q.dtype)
                chunk_rest = product(p, v, chunk_rest * shrink[:, None])
            # Kept in one loop, so that loads run ahead across chunks. An unfinished last chunk is folded behind the
            # loop.
            if (start + TILE_KEYS) % CHUNK == 0:
                if DIM_REST > 0:
                    acc_rest, _, _ = _fold(acc_rest, peak, total, chunk_rest * value_scale, chunk_peak, chunk_total)
                acc, peak, total = _fold(acc, peak, total, chunk_acc * value_scale, chunk_peak, chunk_total)
        # A chunk that was folded is not folded twice; one that saw nothing changes no bit.
        folded = tl.cdiv(stop, TILE_KEYS) * TILE_KEYS % CHUNK == 0
        chunk_peak = tl.where(folded, float("-inf"), chunk_peak)
        if DIM_REST > 0:
            acc_rest, _, _ = _fold(acc_rest, peak, total, chunk_rest * value_scale, chunk_peak, chunk_total)
        acc, peak, total = _fold(acc, peak, total, chunk_acc * value_scale, chunk_peak, chunk_total)

        if partial < 0:
            # Rows of the tile behind the item's last one have seen nothing.
            total = tl.where(valid, total, 1.0)
            tl.store(
                out + query_offset[:, None] + dims[None, :], (acc / total[:, None]).to(q.dtype), mask=valid[:, None]
            )
            if DIM_REST > 0:
                wide = (acc_rest / total[:, None]).to(q.dtype)
                tl.store(out + query_offset[:, None] + rest[None, :], wide, mask=valid[:, None])
        else:
            index = (partial + split * num_rows + row).to(tl.int64) * NUM_HEADS + query_head
            tl.store(maxima + index, peak, mask=valid)
            tl.store(sums + index, total, mask=valid)
            tl.store(accumulators + index[:, None] * HEAD_DIM + dims[None, :], acc, mask=valid[:, None])
            if DIM_REST > 0:
                tl.store(accumulators + index[:, None] * HEAD_DIM + rest[None, :], acc_rest, mask=valid[:, None])
        unit = tl.atomic_add(schedule, 1)
    # The last program to finish resets the tickets for the next layer.
    if tl.atomic_add(schedule + 1, 1) == tl.num_programs(0) - 1:
        tl.store(schedule, 0)
        tl.store(schedule + 1, 0)


@jit()
def _merge_kernel(
    accumulators: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    merge_rows: tl.tensor,
    merge_start: tl.tensor,
    merge_partials: tl.tensor,
    out: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, PADDED_DIM)
    mask = (head < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    peak = tl.full([TILE_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_HEADS], tl.float32)
    acc = tl.zeros([TILE_HEADS, PADDED_DIM], tl.float32)
    start = tl.load(merge_start + number)
    stop = tl.load(merge_start + number + 1)
    for place in range(start, stop):
        index = tl.load(merge_partials + place).to(tl.int64) * NUM_HEADS + head
        part_peak = tl.load(maxima + index, mask=head < NUM_HEADS, other=float("-inf"))
        part_total = tl.load(sums + index, mask=head < NUM_HEADS, other=0.0)
        part_acc = tl.load(accumulators + index[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        acc, peak, total = _fold(acc, peak, total, part_acc, part_peak, part_total)
    total = tl.where(head < NUM_HEADS, total, 1.0)
    if stop > start:
        offset = (tl.load(merge_rows + number).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
        tl.store(out + offset[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def attention_triton(
    query: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention` on a GPU. `kv` has the query's dtype, or e4m3. Raises ValueError for a head dimension the tuning
    table lacks."""
    query = query.contiguous()
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv.shape[3:5]
    device = query.device
    config = _config(query.dtype, head_dim, device)
    out = torch.zeros_like(query)
    accumulators = torch.empty(plan.num_partials, num_heads, head_dim, device=device)
    maxima = torch.empty(plan.num_partials, num_heads, device=device)
    sums = torch.empty(plan.num_partials, num_heads, device=device)
    if plan.schedule is None:
        plan = schedule_attention_triton(plan, HeadShape(num_heads, num_kv_heads, head_dim, query.dtype))
    main_dim = 1 << (head_dim.bit_length() - 1)
    launch(
        _attention_kernel,
        (num_processors(device) * config["programs_per_processor"],),
        device=device,
        arguments={
            "query": query,
            "kv": as_kernel_operand(kv),
            "kv_scale": kv_scale,
            "positions": plan.positions,
            "tables": plan.tables,
            "block_table": plan.block_table,
            "items": plan.items,
            "schedule": plan.schedule,
            "accumulators": accumulators,
            "maxima": maxima,
            "sums": sums,
            "out": out,
            "layer": layer,
            "num_items": plan.items.shape[0],
            "table_stride": plan.block_table.stride(0),
            "block_stride": kv.stride(0),
            "score_scale": scale * _LOG2_E,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": num_heads // num_kv_heads,
            "BLOCK_SIZE": block_size,
            "DIM": main_dim,
            "DIM_REST": head_dim - main_dim,
            "HAS_KV_SCALE": kv_scale is not None,
            "CHUNK": CHUNK,
            "TILE_ROWS": config["tile_rows"],
            "TILE_KEYS": config["tile_keys"],
        },
        options=launch_options(config),
    )
    if plan.merge_rows.numel():
        merge_triton(accumulators, maxima, sums, plan=plan, out=out)
    return out


def merge_triton(
    accumulators: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, *, plan: AttentionPlan, out: torch.Tensor
) -> None:
    """`merge` on a GPU, with `maxima` in powers of two. Bound: memory."""
    num_heads, head_dim = out.shape[1:]
    tile_heads = min(8, next_power_of_2(num_heads))
    launch(
        _merge_kernel,
        (plan.merge_rows.numel(), -(-num_heads // tile_heads)),
        device=out.device,
        arguments={
            "accumulators": accumulators,
            "maxima": maxima,
            "sums": sums,
            "merge_rows": plan.merge_rows,
            "merge_start": plan.merge_start,
            "merge_partials": plan.merge_partials,
            "out": out,
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "TILE_HEADS": tile_heads,
            "PADDED_DIM": next_power_of_2(head_dim),
        },
        options={"num_warps": 4},
    )


def head_dims(device: torch.device) -> list[int]:
    """Head dimensions that the tuning table has for `device`, ascending."""
    return sorted({int(name.partition("/")[2]) for name in shape_classes("attention", device)})


def _config(dtype: torch.dtype, head_dim: int, device: torch.device) -> Config:
    return exact_config("attention", f"{'float' if dtype == torch.float32 else 'half'}/{head_dim}", device)
