"""Tiers that keep books and no bytes: for working out what a store would do with sizes this machine may not have.

A block is one byte, the same byte for all, so that every decision of `TieredStore` is taken by its own code and costs
no memory. Counters count blocks; who knows the size of a real block multiplies.
"""

from __future__ import annotations

from batchllm.storage.frame import Frame, Frames
from batchllm.storage.host import HostTier
from batchllm.storage.tier import MissCause, Outcome, TierCounters, Transfer, TransferKind

BLOCK_BYTES = 1


class OneByteFrames(Frames):
    """`num_frames` frames that all lie in the same page: they count, and what is written to them is lost."""

    def __init__(self, num_frames: int) -> None:
        super().__init__(num_frames=1, block_bytes=BLOCK_BYTES)
        self.num_frames = num_frames
        page = self._free.pop()
        self._free = [Frame(address=page.address, whole=page.whole, payload=page.payload) for _ in range(num_frames)]


def ledger_host(*, num_slots: int, num_spare: int) -> HostTier:
    """A host tier of one-byte blocks in frames without room."""
    frames = OneByteFrames(num_slots + num_spare)
    return HostTier(num_slots=num_slots, block_bytes=BLOCK_BYTES, num_spare=num_spare, frames=frames)


class LedgerDisk:
    """A lower tier whose transfers succeed at once and are returned by the next `poll`."""

    backend = "ledger"
    block_bytes = BLOCK_BYTES
    depth = 32
    is_refusing = False

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"{num_slots} slots")
        self.num_slots = num_slots
        self._counters = TierCounters()
        self._blocks: dict[bytes, None] = {}
        self._finished: list[Transfer] = []

    @property
    def counters(self) -> TierCounters:
        return self._counters

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._blocks)

    def keys(self) -> list[bytes]:
        return list(self._blocks)

    def contains(self, key: bytes) -> bool:
        return key in self._blocks

    def store(self, key: bytes, data: memoryview | Frame, *, replace: bytes | None = None) -> Transfer:
        transfer = Transfer(TransferKind.STORE, key, BLOCK_BYTES)
        if key not in self._blocks and self.num_free == 0 and replace in self._blocks:
            del self._blocks[replace]
        if key in self._blocks or self.num_free > 0:
            self._blocks[key] = None
            return self._end(transfer, Outcome.DONE)
        return self._end(transfer, Outcome.FULL)

    def load(self, key: bytes, into: memoryview | Frame) -> Transfer:
        transfer = Transfer(TransferKind.LOAD, key, BLOCK_BYTES)
        if key in self._blocks:
            return self._end(transfer, Outcome.DONE)
        transfer.cause = MissCause.ABSENT
        return self._end(transfer, Outcome.MISS)

    def poll(self, timeout_s: float = 0.0) -> list[Transfer]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        self._blocks.clear()

    def check_integrity(self) -> None:
        assert len(self._blocks) <= self.num_slots, "more blocks than slots"

    def _end(self, transfer: Transfer, outcome: Outcome) -> Transfer:
        self._counters.begin(transfer)
        transfer.outcome = outcome
        self._counters.end(transfer)
        self._finished.append(transfer)
        return transfer
