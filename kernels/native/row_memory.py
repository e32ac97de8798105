"""Memory for the rows that operations give: taken again when its last tensor is gone.

A layer makes three tensors of some megabytes and drops them. malloc aligns each by cutting a larger piece, small things settle in what is
cut off, and the next tensor no longer fits: after a few steps of 2,048 rows a heap held 100 MB of holes.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from batchllm.kernels.native.memory import advise_huge_pages

_LEAST_BYTES = 128 << 10
"""Smaller tensors are malloc's: they fit its holes."""
_GRAIN_BYTES = 1 << 20

_free: list[torch.Tensor] = []
"""Memory without a tensor. Its pieces are as many as tensors ever lived at once."""


class _Lent(np.ndarray):
    """A tensor's memory as torch holds it: until the last view is gone."""

    memory: torch.Tensor

    def __del__(self, free: list[torch.Tensor] = _free) -> None:
        free.append(self.memory)


def empty_rows(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor without values, as `torch.empty` gives; its memory may have been another's that is gone."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = _take(num_bytes)
    lent = memory.numpy()[:num_bytes].view(_Lent)
    lent.memory = memory
    return torch.from_numpy(lent).view(dtype).view(shape)


def _take(num_bytes: int) -> torch.Tensor:
    """The smallest free memory that is large enough. Where there is none, new memory takes the place of the largest."""
    # Off the list first: another thread may be here too.
    pieces, _free[:] = sorted(_free, key=len), []
    fitting = next((piece for piece in pieces if len(piece) >= num_bytes), None)
    if fitting is None:
        del pieces[-1:]
        fitting = torch.empty(-(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES, dtype=torch.uint8)
        advise_huge_pages(fitting)
    _free.extend(piece for piece in pieces if piece is not fitting)
    return fitting
