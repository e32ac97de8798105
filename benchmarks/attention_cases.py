"""Attention steps with random inputs, their plans, and their float64 answers: what the tests and `gpu.py` check with.

KV slots that no row may see hold NaN.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from kernel_cases import error_share

from batchllm.kernels import attention_triton
from batchllm.kernels.attention import CHUNK, AttentionPlan
from batchllm.kernels.floats import E4M3_MAX, FP8_DTYPE


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One step: sequence i has `kv_lengths[i]` tokens, of which the last `query_lengths[i]` are query rows.

    `layout`: `private`, one item a sequence; `split`, the first chunk and the rest apart; `shared`, one item over the
    first
    `shared_length` tokens (a multiple of CHUNK), which all sequences share, and a tail each.
    """

    kv_lengths: tuple[int, ...]
    query_lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    layout: str = "private"
    shared_length: int = 0
    num_layers: int = 2


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    shape: AttentionShape
    query: torch.Tensor
    kv: torch.Tensor
    kv_scale: torch.Tensor | None
    plan: AttentionPlan


def attention_inputs(
    shape: AttentionShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> AttentionInputs:
    """Query rows, a pool whose blocks lie in random order with a padded stride, and the plan. `kv_dtype` None: the
    query's."""
    generator = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    table, num_blocks = _block_table(shape, generator)
    block = (shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    elements = torch.Size(block).numel()
    stride = -(-elements // 4096) * 4096 + 4096
    wide = torch.full((num_blocks, stride), torch.nan)
    pool = wide[:, :elements].view(num_blocks, *block)
    for number, kv_length in enumerate(shape.kv_lengths):
        position = torch.arange(kv_length)
        ids = table[number, position // shape.block_size].long()
        values = torch.randn(kv_length, *block[:3], shape.head_dim, generator=generator)
        first = shape.shared_length if number else 0
        pool[ids[first:], :, :, :, position[first:] % shape.block_size] = values[first:]
    kv_scale = None
    if kv_dtype == FP8_DTYPE:
        kv_scale = torch.rand(shape.num_layers, 2, shape.num_kv_heads, generator=generator) * 0.01 + 0.005
        pool /= kv_scale[None, :, :, :, None, None]
        wide = wide.clamp(-E4M3_MAX, E4M3_MAX)
    pool = wide.to(kv_dtype).to(device)[:, :elements].view(num_blocks, *block)
    query = torch.randn(sum(shape.query_lengths), shape.num_heads, shape.head_dim, generator=generator) * 2
    return AttentionInputs(
        shape=shape,
        query=query.to(dtype).to(device),
        kv=pool,
        kv_scale=None if kv_scale is None else kv_scale.to(device),
        plan=attention_plan(shape, table=table, device=device),
    )


def attention_plan(shape: AttentionShape, *, table: torch.Tensor, device: torch.device) -> AttentionPlan:
    """The work items of `shape.layout`."""
    positions = [
        position
        for kv_length, num_rows in zip(shape.kv_lengths, shape.query_lengths, strict=True)
        for position in range(kv_length - num_rows, kv_length)
    ]
    items: list[tuple[int, ...]] = []
    partials: list[list[int]] = [[] for _ in positions]
    num_partials = 0

    def add_item(first: int, num_rows: int, kv_start: int, kv_stop: int) -> None:
        nonlocal num_partials
        items.append((first, num_rows, kv_start, kv_stop, kv_stop, num_partials))
        chunks = range(kv_start, kv_start + 1 if kv_start == 0 else kv_stop, CHUNK)
        for chunk, chunk_start in enumerate(chunks):
            for row in range(num_rows):
                if positions[first + row] >= chunk_start:
                    partials[first + row].append(num_partials + chunk * num_rows + row)
        num_partials += len(chunks) * num_rows

    if shape.layout == "shared":
        add_item(0, len(positions), 0, shape.shared_length)
    start = 0
    for kv_length, num_rows in zip(shape.kv_lengths, shape.query_lengths, strict=True):
        cut = {"private": 0, "split": CHUNK, "shared": shape.shared_length}[shape.layout]
        if shape.layout == "split" and kv_length > cut:
            add_item(start, num_rows, 0, cut)
        if cut == 0 or (shape.layout == "split" and kv_length <= cut):
            items.append((start, num_rows, 0, kv_length, kv_length, -1))
        else:
            before = sum(position < cut for position in positions[start : start + num_rows])
            if before < num_rows:
                add_item(start + before, num_rows - before, cut, kv_length)
        start += num_rows

    merged = [row for row, listed in enumerate(partials) if listed]
    starts = [0]
    for row in merged:
        starts.append(starts[-1] + len(partials[row]))
    as_int32 = {"dtype": torch.int32, "device": device}
    return AttentionPlan(
        positions=torch.tensor(positions, **as_int32),
        tables=torch.arange(len(shape.query_lengths))
        .repeat_interleave(torch.tensor(shape.query_lengths))
        .to(**as_int32),
        block_table=table.to(**as_int32),
        items=torch.tensor(items, **as_int32).reshape(-1, 6),
        merge_rows=torch.tensor(merged, **as_int32),
        merge_start=torch.tensor(starts, **as_int32),
        merge_partials=torch.tensor([number for row in merged for number in partials[row]], **as_int32),
        num_partials=num_partials,
    )


def attention_answer(inputs: AttentionInputs, *, layer: int, scale: float) -> torch.Tensor:
    """Dense attention in float64 on the CPU, from the stored keys and values."""
    shape = inputs.shape
    group = shape.num_heads // shape.num_kv_heads
    kv = inputs.kv.cpu()
    table = inputs.plan.block_table.cpu()
    answer, start = [], 0
    for number, (kv_length, num_rows) in enumerate(zip(shape.kv_lengths, shape.query_lengths, strict=True)):
        position = torch.arange(kv_length)
        ids = table[number, position // shape.block_size].long()
        query = inputs.query[start : start + num_rows].cpu().double()
        sides = []
        for side in (0, 1):
            # [tokens, kv_heads, head_dim]
            stored = kv[:, layer, side].transpose(1, 2)[ids, position % shape.block_size].double()
            if inputs.kv_scale is not None:
                stored = stored * inputs.kv_scale[layer, side].cpu().double()[None, :, None]
            sides.append(stored.repeat_interleave(group, dim=1))
        scores = torch.einsum("rhd,thd->hrt", query, sides[0]) * scale
        rows = torch.arange(kv_length - num_rows, kv_length)
        scores.masked_fill_(position[None, :] > rows[:, None], -torch.inf)
        answer.append(torch.einsum("hrt,thd->rhd", scores.softmax(dim=-1), sides[1]))
        start += num_rows
    return torch.cat(answer)


def attention_share(
    shape: AttentionShape, *, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
) -> float:
    inputs = attention_inputs(shape, dtype=dtype, device=device, kv_dtype=kv_dtype)
    scale = shape.head_dim**-0.5
    layer = shape.num_layers - 1
    got = attention_triton.attention_triton(
        inputs.query, inputs.kv, layer=layer, plan=inputs.plan, scale=scale, kv_scale=inputs.kv_scale
    )
    return error_share(got, attention_answer(inputs, layer=layer, scale=scale), dtype=dtype)


def layout_results(shape: AttentionShape, *, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """The output rows of a shared step under each layout, and of its sequences each alone: all the same bits."""
    inputs = attention_inputs(shape, dtype=dtype, device=device)
    table = inputs.plan.block_table.cpu()

    def run(query: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        scale = shape.head_dim**-0.5
        return attention_triton.attention_triton(query, inputs.kv, layer=0, plan=plan, scale=scale)

    results = []
    for layout in ("shared", "private", "split"):
        plan = attention_plan(dataclasses.replace(shape, layout=layout), table=table, device=device)
        results.append(run(inputs.query, plan))
    alone, start = [], 0
    for number, (kv_length, num_rows) in enumerate(zip(shape.kv_lengths, shape.query_lengths, strict=True)):
        single = dataclasses.replace(shape, kv_lengths=(kv_length,), query_lengths=(num_rows,), layout="private")
        plan = attention_plan(single, table=table[number : number + 1], device=device)
        alone.append(run(inputs.query[start : start + num_rows], plan))
        start += num_rows
    return [*results, torch.cat(alone)]


def _block_table(shape: AttentionShape, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """int32 [num_sequences, max_blocks] with -1 behind each end, and the pool's size in blocks, some of which nobody
    uses."""
    shared = shape.shared_length // shape.block_size
    counts = [-(-kv_length // shape.block_size) for kv_length in shape.kv_lengths]
    num_blocks = shared + sum(count - shared for count in counts) + 3
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    table = torch.full((len(counts), max(counts) + 2), -1, dtype=torch.int32)
    table[:, :shared] = order[:shared]
    used = shared
    for number, count in enumerate(counts):
        table[number, shared:count] = order[used : used + count - shared]
        used += count - shared
    return table, num_blocks
