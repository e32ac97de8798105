"""Page-aligned memory for blocks, and the header that makes a block on disk speak for itself.

A frame is one block's room in memory, laid out as it lies on disk: a header page, then the payload, padded to whole
pages. So a frame goes to disk and comes back in one I/O with no copy.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

PAGE_BYTES = 4096
_MAGIC = b"BLLMBLK1"
_FIELDS = struct.Struct(
    "<8s32s32sQQQd"
)  # magic, key, fingerprint, payload bytes, payload checksum, generation, unix time
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


def frame_stride(block_bytes: int) -> int:
    """Bytes of one frame: header page and payload in whole pages."""
    return PAGE_BYTES + -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True, eq=False)
class Frame:
    """`whole` starts at `address`, a page boundary; `payload` is the part that holds the block's own bytes.

    `payload_checksum` is the payload's, where whoever wrote the payload has computed it; None: not known. What is
    stored with a known checksum is not summed again, so damage done to it in memory meanwhile is found on reading back.
    """

    address: int
    whole: memoryview
    payload: memoryview
    payload_checksum: int | None = None


class Frames:
    """Owns `num_frames` frames of `block_bytes` payload, handed out and taken back, last in first out.

    `memory`, where given, is the caller's (for example pinned) and must hold `num_frames * frame_stride + PAGE_BYTES`
    bytes.
    """

    def __init__(self, *, num_frames: int, block_bytes: int, memory: memoryview | None = None) -> None:
        if num_frames < 0 or block_bytes < 1:
            raise ValueError(f"{num_frames} frames of {block_bytes} bytes")
        self.num_frames = num_frames
        self.block_bytes = block_bytes
        self.stride = frame_stride(block_bytes)
        size = num_frames * self.stride
        if memory is None:
            # Private, not shared, memory: huge pages make it cheaper for the kernel to pin it for each direct I/O.
            region = mmap.mmap(-1, max(size, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE") and size >= 1 << 21:
                try:
                    region.madvise(mmap.MADV_HUGEPAGE)
                except OSError:
                    pass  # a kernel without huge pages: slower, not wrong
            memory = memoryview(region)
        memory = memory.cast("B")
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE_BYTES if size else 0
        if size and len(memory) < start + size:
            raise ValueError(f"{num_frames} frames need {start + size} bytes of memory, there are {len(memory)}")
        self._free: list[Frame] = []
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start if size else 0
        for index in reversed(range(num_frames)):
            first = start + index * self.stride
            whole = memory[first : first + self.stride]
            payload = whole[PAGE_BYTES : PAGE_BYTES + block_bytes]
            self._free.append(Frame(address=base + index * self.stride, whole=whole, payload=payload))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> Frame | None:
        """A free frame, now the caller's; None when all are taken."""
        if not self._free:
            return None
        frame = self._free.pop()
        frame.payload_checksum = None
        return frame

    def give_back(self, frame: Frame) -> None:
        assert len(self._free) < self.num_frames, "a frame was given back twice"
        self._free.append(frame)


def copy_bytes(*, source: memoryview, target: memoryview) -> None:
    """Copy equal lengths; numpy's copy lets other Python threads run meanwhile, a memoryview's does not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def checksum(payload: memoryview) -> int:
    """64 bits against damage, not against malice: XXH3, which costs less than reading the bytes from memory."""
    return xxhash.xxh3_64_intdigest(payload)


class CopyChecksum(Protocol):
    """Copies equal lengths and returns the `checksum` of the bytes: `copy_checksum`, or what does it faster."""

    def __call__(self, *, source: memoryview, target: memoryview) -> int: ...


def copy_checksum(*, source: memoryview, target: memoryview) -> int:
    """Copy a block and sum it while it is in the processor's cache: a third of what it costs later."""
    copy_bytes(source=source, target=target)
    return checksum(target)


class Header(NamedTuple):
    """What a slot says about itself. `written_s` is unix time; a higher `generation` was written later."""

    key: bytes
    fingerprint: bytes
    payload_bytes: int
    payload_checksum: int
    generation: int
    written_s: float


def write_header(page: memoryview, header: Header) -> None:
    """Put the header and its own checksum at the start of `page`."""
    _FIELDS.pack_into(page, 0, _MAGIC, *header)
    _CHECKSUM.pack_into(page, _FIELDS.size, xxhash.xxh3_64_intdigest(page[: _FIELDS.size]))


def read_header(page: memoryview | bytes) -> Header | None:
    """The header at the start of `page`, or None where there is none or a byte of it is wrong."""
    if len(page) < HEADER_BYTES:
        return None
    magic, *fields = _FIELDS.unpack_from(page)
    if magic != _MAGIC or _CHECKSUM.unpack_from(page, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(
        page[: _FIELDS.size]
    ):
        return None
    return Header(*fields)
