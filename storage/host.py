"""Blocks in host memory: a bounded pool of frames.

A store or load is one copy of a block on the calling thread. A thread would not pay: a block of 0.3 MB copies in tens
of microseconds, about what handing it over and being told of its end costs, and the caller's memory is free again at
once. Frames beyond `num_slots` are spare: room for blocks that are on their way to or from a lower tier, so that
neither the cached blocks nor the I/O can starve the other.
"""

from __future__ import annotations

from batchllm.storage.frame import Frame, Frames, copy_bytes
from batchllm.storage.tier import MissCause, Outcome, TierCounters, Transfer, TransferKind, payload_view


class HostTier:
    """Owns `num_slots + num_spare` frames: of its own, in `memory` (see `Frames`), or those in `frames`."""

    def __init__(
        self,
        *,
        num_slots: int,
        block_bytes: int,
        num_spare: int = 0,
        memory: memoryview | None = None,
        frames: Frames | None = None,
    ) -> None:
        if num_slots < 0 or num_spare < 0:
            raise ValueError(f"{num_slots} slots and {num_spare} spare frames")
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self.num_spare = num_spare
        self.counters = TierCounters()
        self._frames = frames or Frames(num_frames=num_slots + num_spare, block_bytes=block_bytes, memory=memory)
        self._index: dict[bytes, Frame] = {}
        self._num_reserved = 0
        self._finished: list[Transfer] = []

    def contains(self, key: bytes) -> bool:
        return key in self._index

    def store(self, key: bytes, data: memoryview | Frame, *, replace: bytes | None = None) -> Transfer:
        view = payload_view(data, block_bytes=self.block_bytes)
        transfer = Transfer(TransferKind.STORE, key, self.block_bytes)
        if key not in self._index and self.num_free == 0 and replace in self._index:
            self.discard(replace)
        if key not in self._index and (frame := self.reserve()) is not None:
            copy_bytes(source=view, target=frame.payload)
            self.commit(key, frame)
            transfer.outcome = Outcome.DONE
            self._finished.append(transfer)
            return transfer
        self.counters.begin(transfer)
        return self._end(transfer, Outcome.DONE if key in self._index else Outcome.FULL)

    def load(self, key: bytes, into: memoryview | Frame) -> Transfer:
        view = payload_view(into, block_bytes=self.block_bytes)
        transfer = Transfer(TransferKind.LOAD, key, self.block_bytes)
        self.counters.begin(transfer)
        frame = self._index.get(key)
        if frame is None:
            transfer.cause = MissCause.ABSENT
            return self._end(transfer, Outcome.MISS)
        copy_bytes(source=frame.payload, target=view)
        return self._end(transfer, Outcome.DONE)

    def poll(self, timeout_s: float = 0.0) -> list[Transfer]:
        """Never waits: a host transfer has ended when its call returns."""
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        for key in list(self._index):
            self.discard(key)

    # Two-phase access for the owner of a lower tier: a frame is the caller's between `reserve`, `detach` or
    # `take_spare` and `commit` or `release`; its block is not found meanwhile.

    @property
    def num_free(self) -> int:
        """Slots that hold no block and are promised to none."""
        return self.num_slots - len(self._index) - self._num_reserved

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_free_frames(self) -> int:
        return self._frames.num_free

    def reserve(self) -> Frame | None:
        """A frame to fill and `commit`; it counts as a slot from now on. None where all slots are taken."""
        if self.num_free <= 0:
            return None
        frame = self._frames.take()
        if frame is not None:
            self._num_reserved += 1
        return frame

    def commit(self, key: bytes, frame: Frame) -> None:
        """Make a reserved frame, now whole, the block `key`; counts as a store."""
        assert key not in self._index, "a block is committed once"
        self.counters.num_stores += 1
        self.counters.num_stored += 1
        self.counters.bytes_in += self.block_bytes
        self._num_reserved -= 1
        self._index[key] = frame

    def cancel(self, frame: Frame) -> None:
        """Give up a reserved frame."""
        self._num_reserved -= 1
        self._frames.give_back(frame)

    @property
    def has_spare(self) -> bool:
        """Whether a frame can leave the slots (`take_spare`, `detach`) with every free slot still backed by a frame."""
        return self._frames.num_free > self.num_free

    def take_spare(self) -> Frame | None:
        """A frame outside the slots; None where the I/O room is used up."""
        return self._frames.take() if self.has_spare else None

    def detach(self, key: bytes) -> Frame:
        """Take a block out of its slot with its bytes; the frame counts as spare until `release`."""
        assert self.has_spare, "a block is detached only into free I/O room"
        return self._index.pop(key)

    def release(self, frame: Frame) -> None:
        """Give back a detached or spare frame."""
        self._frames.give_back(frame)

    def frame(self, key: bytes) -> Frame:
        """Where a block lies. The caller keeps it from being discarded while it reads it."""
        return self._index[key]

    def discard(self, key: bytes) -> None:
        """Forget a block and free its slot."""
        self._frames.give_back(self._index.pop(key))

    def _end(self, transfer: Transfer, outcome: Outcome) -> Transfer:
        transfer.outcome = outcome
        self.counters.end(transfer)
        self._finished.append(transfer)
        return transfer
