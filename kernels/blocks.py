"""Moves of whole KV blocks: pool to staging, staging to pool, pool to pool. A block is contiguous over all layers.

Bound: memory, or the host link where the staging area is pinned host memory, which a GPU kernel reads and writes in
place. One launch moves any number of blocks wherever they lie; a program copies one run of one block.
"""

from __future__ import annotations

import torch

from batchllm.kernels.floats import as_bytes
from batchllm.kernels.launch import jit, launch, tl
from batchllm.kernels.tuning import exact_config, launch_options


def gather_blocks(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copies the blocks `block_ids` int64 [n] of the pool [num_blocks, ...] into `staging` [n or more, ...], in that
    order."""
    torch.index_select(kv, 0, block_ids, out=staging[: block_ids.numel()])


def scatter_blocks(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copies the first rows of `staging` into the blocks `block_ids` int64 [n] of the pool; ids are distinct."""
    kv[block_ids] = staging[: block_ids.numel()]


def copy_blocks(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies block `sources[i]` over block `targets[i]`, int64 [n]; no target is also a source."""
    kv[targets] = kv[sources]


@jit()
def _move_blocks_kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_ids: tl.tensor,
    target_ids: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    block_elements: tl.tensor,
    num_runs: tl.tensor,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One axis: the others end at 65,535.
    number = (tl.program_id(0) // num_runs).to(tl.int64)
    run = tl.program_id(0) % num_runs
    source_block = number
    target_block = number
    if HAS_SOURCE_IDS:
        source_block = tl.load(source_ids + number)
    if HAS_TARGET_IDS:
        target_block = tl.load(target_ids + number)
    element = run * BLOCK + tl.arange(0, BLOCK)
    mask = element < block_elements
    values = tl.load(source + source_block * source_stride + element, mask=mask)
    tl.store(target + target_block * target_stride + element, values, mask=mask)


def gather_blocks_triton(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """`gather_blocks` on a GPU, on the current stream; `staging` may be pinned host memory, whole only once the stream
    got there."""
    _move_blocks(source=kv, target=staging, source_ids=block_ids, target_ids=None)


def scatter_blocks_triton(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """`scatter_blocks` on a GPU, on the current stream; pinned `staging` stays untouched until the stream got there."""
    _move_blocks(source=staging, target=kv, source_ids=None, target_ids=block_ids)


def copy_blocks_triton(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """`copy_blocks` on a GPU, on the current stream."""
    _move_blocks(source=kv, target=kv, source_ids=sources, target_ids=targets)


def _move_blocks(
    *, source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor | None, target_ids: torch.Tensor | None
) -> None:
    source_ids, target_ids = (None if ids is None else ids.contiguous() for ids in (source_ids, target_ids))
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None, "one side of a move is named by ids"
    elements = source[0].numel()
    config = exact_config("move_blocks", "any", ids.device)
    num_runs = -(-elements // config["block"])
    launch(
        _move_blocks_kernel,
        (ids.numel() * num_runs,),
        device=ids.device,
        arguments={
            "source": as_bytes(source),
            "target": as_bytes(target),
            "source_ids": source_ids,
            "target_ids": target_ids,
            "source_stride": source.stride(0),
            "target_stride": target.stride(0),
            "block_elements": elements,
            "num_runs": num_runs,
            "HAS_SOURCE_IDS": source_ids is not None,
            "HAS_TARGET_IDS": target_ids is not None,
            "BLOCK": config["block"],
        },
        options=launch_options(config),
    )
