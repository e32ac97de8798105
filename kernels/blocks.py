"""Moves of whole KV blocks: pool to staging, staging to pool, pool to pool. Bound: memory. A block is contiguous over all layers."""

from __future__ import annotations

import torch


def gather_blocks(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copies the blocks `block_ids` int64 [n] of the pool [num_blocks, ...] into `staging` [n or more, ...], in that order."""
    torch.index_select(kv, 0, block_ids, out=staging[: block_ids.numel()])


def scatter_blocks(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copies the first rows of `staging` into the blocks `block_ids` int64 [n] of the pool; ids are distinct."""
    kv[block_ids] = staging[: block_ids.numel()]


def copy_blocks(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies block `sources[i]` over block `targets[i]`, int64 [n]; no target is also a source."""
    kv[targets] = kv[sources]
