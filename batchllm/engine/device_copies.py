"""Copies of blocks between a pool on a GPU and pinned host memory, on streams of their own beside the one that computes.

A block is one run of bytes in the pool, some hundred kilobytes: one copy of it is large enough for the link, with nothing to gather.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Copy(Protocol):
    """A copy on its way."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Returns when it is done."""


class BlockCopies(Protocol):
    """Slots of host memory, one block each, and copies between them and the pool's blocks.

    Copies keep their place among what the engine gives the device to do: one out of a block comes behind everything given before it and
    before everything given after it, so the block may be used again at once; one into a block comes behind everything given before it,
    and the block may be used when the copy is done.
    """

    num_slots: int
    block_bytes: int

    def view(self, slot: int) -> memoryview:
        """A slot's bytes. Not to be written while a copy from it is on its way, nor read while one into it is."""

    def to_host(self, block: int, slot: int) -> Copy: ...

    def to_device(self, slot: int, block: int) -> Copy: ...


class CudaCopy:
    """The end of a copy on a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaCopies:
    """`BlockCopies` of a CUDA pool: one stream out, one in, so that both directions of the link are in use."""

    def __init__(self, pool: torch.Tensor, *, num_slots: int) -> None:
        """`pool` as `make_pool` makes it."""
        assert pool.device.type == "cuda", "streams and events are CUDA's"
        self.num_slots = num_slots
        self.block_bytes = pool.stride(0) * pool.element_size()
        storage = torch.empty(0, dtype=torch.uint8, device=pool.device).set_(pool.untyped_storage())
        self._blocks = storage.view(-1, self.block_bytes)
        self._slots = torch.empty((num_slots, self.block_bytes), dtype=torch.uint8, pin_memory=True)
        self._views = [memoryview(slot.numpy().data) for slot in self._slots]
        self._out = torch.cuda.Stream(pool.device)
        self._in = torch.cuda.Stream(pool.device)

    def view(self, slot: int) -> memoryview:
        return self._views[slot]

    def to_host(self, block: int, slot: int) -> CudaCopy:
        event = self._copy(self._out, source=self._blocks[block], target=self._slots[slot])
        # What is computed from now on may write the block.
        torch.cuda.current_stream(self._blocks.device).wait_event(event)
        return CudaCopy(event)

    def to_device(self, slot: int, block: int) -> CudaCopy:
        return CudaCopy(self._copy(self._in, source=self._slots[slot], target=self._blocks[block]))

    def _copy(self, stream: torch.cuda.Stream, *, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        # What was computed until now may still write the block, or read what lay in it.
        stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event
