"""The pool tensor: the bytes of all KV blocks on the device that computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from batchllm.errors import JobError
from batchllm.kernels.native.memory import advise_huge_pages

STRIDE_BYTES = 4096
"""Block strides are multiples of this, so that a block is read and written with O_DIRECT as it lies."""


class KeptHeads(Protocol):
    """What a model's configuration says of keys and values."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one model keeps for a token: keys and values of `num_kv_heads` heads of `head_dim` numbers, in each of `num_layers`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: KeptHeads, dtype: torch.dtype) -> KvShape:
        """That of a model whose keys and values are kept in `dtype`."""
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, dtype)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in the pool, padded to STRIDE_BYTES."""
        return -(-self.bytes_per_token * block_size // STRIDE_BYTES) * STRIDE_BYTES


def make_pool(shape: KvShape, *, num_blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    """An unwritten pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; a block is contiguous.

    The system maps its pages as blocks are first written, so an oversized pool costs address space, not memory. Raises JobError
    where even that cannot be had.
    """
    stride = shape.block_bytes(block_size) // shape.dtype.itemsize
    inner = (shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
    strides = [math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
    try:
        storage = torch.empty(num_blocks * stride, dtype=shape.dtype, device=device)
    except RuntimeError as error:
        # All that this allocation can raise: torch has no type of its own for it on a CPU.
        num_bytes = num_blocks * shape.block_bytes(block_size)
        raise JobError(f"engine.kv.device: {num_bytes} bytes are not to be had on {device}; give less") from error
    advise_huge_pages(storage)
    return storage.as_strided((num_blocks, *inner), (stride, *strides))
