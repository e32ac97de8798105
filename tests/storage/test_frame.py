from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.storage.frame import (
    HEADER_BYTES,
    PAGE_BYTES,
    Frames,
    Header,
    checksum,
    copy_bytes,
    copy_checksum,
    frame_stride,
    read_header,
    write_header,
)

HEADER = Header(
    key=bytes(range(32)),
    fingerprint=bytes(range(32, 64)),
    payload_bytes=368_640,
    payload_checksum=2**64 - 1,
    generation=7,
    written_s=1.5e9,
)


@pytest.mark.parametrize(
    ("block_bytes", "stride"), [(1, 8192), (4096, 8192), (4097, 12_288), (368_640, 372_736), (6144, 12_288)]
)
def test_a_frame_is_a_header_page_and_whole_pages_of_payload(block_bytes: int, stride: int) -> None:
    assert frame_stride(block_bytes) == stride


def test_frames_start_on_pages_and_do_not_overlap() -> None:
    frames = Frames(num_frames=5, block_bytes=5000)
    taken = [frame for frame in iter(frames.take, None) if frame is not None]
    assert [frame.address % PAGE_BYTES for frame in taken] == [0] * 5
    for number, frame in enumerate(taken):
        frame.whole[:] = bytes([number]) * frames.stride
    assert [set(frame.whole) for frame in taken] == [{number} for number in range(5)]
    assert all(len(frame.payload) == 5000 for frame in taken)


def test_taken_frames_are_not_handed_out_again_until_given_back() -> None:
    frames = Frames(num_frames=1, block_bytes=10)
    frame = frames.take()
    assert frame is not None and frames.take() is None
    frames.give_back(frame)
    assert frames.take() is frame


def test_giving_a_frame_back_twice_is_caught() -> None:
    frames = Frames(num_frames=1, block_bytes=10)
    frame = frames.take()
    assert frame is not None
    frames.give_back(frame)
    with pytest.raises(AssertionError, match="twice"):
        frames.give_back(frame)


def test_frames_in_the_callers_memory_are_aligned_and_lie_inside_it() -> None:
    memory = np.zeros(3 * frame_stride(5000) + PAGE_BYTES, np.uint8)
    frames = Frames(num_frames=3, block_bytes=5000, memory=memoryview(memory))
    for frame in iter(frames.take, None):
        assert frame is not None and frame.address % PAGE_BYTES == 0
        frame.payload[:] = b"\1" * 5000
    assert memory.sum() == 3 * 5000


def test_a_frame_that_is_handed_out_again_has_no_known_checksum() -> None:
    frames = Frames(num_frames=1, block_bytes=10)
    frame = frames.take()
    assert frame is not None
    frame.payload_checksum = copy_checksum(source=memoryview(b"0123456789"), target=frame.payload)
    assert bytes(frame.payload) == b"0123456789" and frame.payload_checksum == checksum(frame.payload)
    frames.give_back(frame)
    assert (again := frames.take()) is frame and again.payload_checksum is None


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="need"):
        Frames(num_frames=3, block_bytes=5000, memory=memoryview(np.zeros(3 * 5000, np.uint8)))


def test_no_frames_at_all_is_a_pool_like_any_other() -> None:
    assert Frames(num_frames=0, block_bytes=10).take() is None


def test_a_header_comes_back_as_it_was_written() -> None:
    page = memoryview(bytearray(PAGE_BYTES))
    write_header(page, HEADER)
    assert read_header(page) == HEADER


@settings(max_examples=100, deadline=None)
@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_no_header_survives_a_changed_byte(position: int, change: int) -> None:
    page = bytearray(PAGE_BYTES)
    write_header(memoryview(page), HEADER)
    page[position] ^= change
    assert read_header(page) is None


@pytest.mark.parametrize("page", [b"", bytes(PAGE_BYTES), b"BLLMBLK1", b"\x80\x04cos\nsystem\n" * 100])
def test_what_is_no_header_is_none(page: bytes) -> None:
    assert read_header(page) is None


def test_every_single_flipped_bit_of_a_payload_changes_its_checksum() -> None:
    payload = bytearray(np.random.default_rng(0).bytes(600))
    seen = {checksum(memoryview(payload))}
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        seen.add(checksum(memoryview(payload)))
        payload[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * len(payload) + 1


def test_copying_takes_readonly_sources_and_any_item_type() -> None:
    source, target = np.arange(50, dtype=np.float32), bytearray(200)
    copy_bytes(source=memoryview(source.tobytes()), target=memoryview(target))
    assert bytes(target) == source.tobytes()
