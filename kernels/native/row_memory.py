"""Memory for the rows that operations give: taken again when its last tensor is gone.

A layer makes three tensors of some megabytes and drops them. malloc aligns each by cutting a larger piece, small things settle in what is
cut off, and the next tensor no longer fits: after a few steps of 2,048 rows a heap held 100 MB of holes.

Between two operations the caches hold the operations' data, not Python: what warm takes 2 µs takes 20 there, and calls into torch most of it.
So a tensor is one array over its memory, of its shape, and two calls.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from batchllm.kernels.native.memory import empty_in_huge_pages

_LEAST_BYTES = 128 << 10
"""Smaller tensors are malloc's: they fit its holes."""
_GRAIN_BYTES = 1 << 20

_WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.int8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}
"""By bytes: numpy has no bfloat16, and torch takes these for any other type of their size."""

_free: dict[int, list[np.ndarray]] = {}
"""Memory without a tensor, by its grains. Its pieces are as many as tensors ever lived at once."""


class _Lent(np.ndarray):
    """A tensor's memory as torch holds it: until the last view is gone."""

    memory: np.ndarray

    def __del__(self, free: dict[int, list[np.ndarray]] = _free) -> None:
        free[len(self.memory) // _GRAIN_BYTES].append(self.memory)


def empty_rows(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor without values, as `torch.empty` gives; its memory may have been another's that is gone."""
    item_bytes = dtype.itemsize
    num_bytes = math.prod(shape) * item_bytes
    if num_bytes < _LEAST_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = _take(-(-num_bytes // _GRAIN_BYTES))
    lent = _Lent(shape, _WORDS[item_bytes], memory)
    lent.memory = memory
    return torch.from_numpy(lent).view(dtype)


def _take(num_grains: int) -> np.ndarray:
    """The smallest free memory that is large enough. Where there is none, new memory takes the place of the largest."""
    memory = _pop(num_grains)
    if memory is not None:
        return memory
    sizes = sorted(_free)
    for size in sizes:
        if size > num_grains and (memory := _pop(size)) is not None:
            return memory
    for size in reversed(sizes):
        if _pop(size) is not None:
            break
    _free.setdefault(num_grains, [])
    return empty_in_huge_pages(num_grains * _GRAIN_BYTES).numpy()


def _pop(num_grains: int) -> np.ndarray | None:
    pieces = _free.get(num_grains)
    try:
        return pieces.pop() if pieces else None
    except IndexError:
        # Another thread has just taken it.
        return None
