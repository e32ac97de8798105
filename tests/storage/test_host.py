from __future__ import annotations

import numpy as np
import pytest

from batchllm.storage.frame import PAGE_BYTES, frame_stride
from batchllm.storage.host import HostTier

BLOCK = memoryview(bytes(range(100)))


def test_a_reserved_frame_counts_as_a_slot_and_is_found_when_committed() -> None:
    tier = HostTier(num_slots=1, block_bytes=100)
    frame = tier.reserve()
    assert frame is not None and tier.reserve() is None
    assert not tier.contains(b"k")
    frame.payload[:] = BLOCK
    tier.commit(b"k", frame)
    assert tier.contains(b"k") and tier.num_blocks == 1
    assert tier.counters.bytes_in == 100


def test_a_cancelled_reservation_gives_its_slot_back() -> None:
    tier = HostTier(num_slots=1, block_bytes=100)
    frame = tier.reserve()
    assert frame is not None
    tier.cancel(frame)
    assert tier.num_free == 1 and tier.num_free_frames == 1


def test_a_detached_block_leaves_its_slot_free_and_its_bytes_in_place() -> None:
    tier = HostTier(num_slots=1, block_bytes=100, num_spare=1)
    tier.store(b"k", BLOCK)
    frame = tier.detach(b"k")
    assert not tier.contains(b"k") and tier.num_free == 1
    tier.store(b"other", memoryview(bytes(100)))
    assert frame.payload == BLOCK
    assert not tier.has_spare
    tier.release(frame)
    assert tier.has_spare


def test_spare_frames_never_take_the_room_of_free_slots() -> None:
    tier = HostTier(num_slots=2, block_bytes=100, num_spare=1)
    assert tier.take_spare() is not None
    assert tier.take_spare() is None
    assert tier.reserve() is not None and tier.reserve() is not None


def test_detaching_without_io_room_is_caught() -> None:
    tier = HostTier(num_slots=1, block_bytes=100)
    tier.store(b"k", BLOCK)
    with pytest.raises(AssertionError, match="I/O room"):
        tier.detach(b"k")


def test_blocks_can_lie_in_memory_of_the_caller() -> None:
    memory = np.zeros(2 * frame_stride(100) + PAGE_BYTES, np.uint8)
    tier = HostTier(num_slots=2, block_bytes=100, memory=memoryview(memory))
    tier.store(b"k", BLOCK)
    assert memory.sum() == sum(range(100))
