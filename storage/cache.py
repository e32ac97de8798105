"""Cache files kept between runs, seen from outside: list, verify, remove. Opens no tier and moves no block."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from batchllm.storage.errors import CacheInUseError, StorageError
from batchllm.storage.frame import PAGE_BYTES, Frames, frame_stride, read_header
from batchllm.storage.seal import Identity, unseal
from batchllm.storage.store_file import SUFFIX, Superblock, read_superblock, slot_offset
from batchllm.storage.tier import MissCause


@dataclass(frozen=True, slots=True)
class CacheFile:
    """One kept file. `superblock` is None where the file is damaged. Times: unix seconds, None without blocks."""

    path: Path
    superblock: Superblock | None
    size_bytes: int
    num_slots: int
    num_blocks: int
    oldest_s: float | None
    newest_s: float | None
    is_in_use: bool


@dataclass(slots=True)
class CacheCheck:
    """What reading every block of a file found. To a run damaged blocks are misses: time, not wrong rows."""

    num_free: int = 0
    num_good: int = 0
    damaged: dict[MissCause, int] = field(default_factory=dict)


def list_caches(folder: Path) -> list[CacheFile]:
    """The cache files of a folder, by name; none where there is no such folder. Reads one page for each slot."""
    return [_describe(path) for path in sorted(folder.glob(f"*{SUFFIX}")) if path.is_file()]


def verify_cache(path: Path) -> CacheCheck:
    """Read and check every block. CacheInUseError while a run has the file, StorageError where it is no cache file."""
    check = CacheCheck()
    with _open_idle(path) as file_descriptor:
        superblock = read_superblock(file_descriptor)
        if superblock is None:
            raise StorageError(f"{path}: no cache file, or its first page is damaged")
        frame = Frames(num_frames=1, block_bytes=superblock.block_bytes).take()
        assert frame is not None
        for slot in range(_num_slots(file_descriptor, superblock)):
            offset = slot_offset(slot, stride=frame_stride(superblock.block_bytes))
            num_read = os.preadv(file_descriptor, [frame.whole], offset)
            cause: MissCause | None
            if num_read < frame.whole.nbytes:
                cause = MissCause.TRUNCATED
            elif not any(frame.whole[:PAGE_BYTES]):
                check.num_free += 1
                continue
            else:
                header = read_header(frame.whole[:PAGE_BYTES])
                key = header.key if header is not None else b""
                cause = unseal(frame, frame, Identity(key, superblock.fingerprint))
            if cause is None:
                check.num_good += 1
            else:
                check.damaged[cause] = check.damaged.get(cause, 0) + 1
    return check


def remove_cache(path: Path) -> bool:
    """Remove a cache file; whether there was one. CacheInUseError while a run has it."""
    try:
        with _open_idle(path):
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _open_idle(path: Path) -> Iterator[int]:
    """The file, locked against runs that would start meanwhile."""
    file_descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not _lock(file_descriptor):
            raise CacheInUseError(f"{path}: in use by a run")
        yield file_descriptor
    finally:
        os.close(file_descriptor)


def _lock(file_descriptor: int) -> bool:
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _num_slots(file_descriptor: int, superblock: Superblock) -> int:
    stride = frame_stride(superblock.block_bytes)
    return max(0, -(-(os.fstat(file_descriptor).st_size - PAGE_BYTES) // stride))


def _describe(path: Path) -> CacheFile:
    file_descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        superblock = read_superblock(file_descriptor)
        times_s: list[float] = []
        num_slots = 0
        if superblock is not None:
            num_slots = _num_slots(file_descriptor, superblock)
            stride = frame_stride(superblock.block_bytes)
            for slot in range(num_slots):
                header = read_header(os.pread(file_descriptor, PAGE_BYTES, slot_offset(slot, stride=stride)))
                if header is not None and header.fingerprint == superblock.fingerprint:
                    times_s.append(header.written_s)
        is_in_use = not _lock(file_descriptor)
        return CacheFile(
            path=path,
            superblock=superblock,
            size_bytes=os.fstat(file_descriptor).st_size,
            num_slots=num_slots,
            num_blocks=len(times_s),
            oldest_s=min(times_s, default=None),
            newest_s=max(times_s, default=None),
            is_in_use=is_in_use,
        )
    finally:
        os.close(file_descriptor)
