"""The one file of a disk tier: where it lies, who holds it, how much room it has.

Page 0 is the superblock: whose blocks these are and how large. Slot `i` is a frame at `PAGE_BYTES + i * stride`.
A file that is kept between runs is named after its owner's fingerprint and locked by `flock` while open, so the lock
dies with its process. A second process that wants the same file, or one that finds another model's blocks under that
name, gets a private nameless file instead: two jobs at once are safe, and the second one only lacks last night's
blocks. A file that is not kept has no name from the start, so nothing is left behind however the process ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from batchllm.storage.errors import StorageError
from batchllm.storage.frame import PAGE_BYTES, Frames, frame_stride

SUFFIX = ".kvcache"
_MAGIC = b"BLLMKVF1"
_FIELDS = struct.Struct("<8s32sQQ")  # magic, fingerprint, block bytes, stride
_CHECKSUM = struct.Struct("<Q")
_FREE_SPACE_KEPT = 0.05
_LOCK_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreFile:
    """An open store. `path` is None for a private file; `notes` say in words what was not as asked."""

    file_descriptor: int
    path: Path | None
    is_direct: bool
    num_slots: int
    is_fresh: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Superblock:
    fingerprint: bytes
    block_bytes: int


def slot_offset(slot: int, *, stride: int) -> int:
    return PAGE_BYTES + slot * stride


def cache_path(folder: Path, *, fingerprint: bytes, block_bytes: int) -> Path:
    """The name of a kept file: one for each fingerprint and block size."""
    stem = hashlib.blake2b(fingerprint + struct.pack("<Q", block_bytes), digest_size=16).hexdigest()
    return folder / f"{stem}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class KeptFile:
    """What a kept file is before it is opened: slots that it has, and bytes that it takes of its file system."""

    num_slots: int
    num_bytes: int


def kept_file(folder: Path, *, fingerprint: bytes, block_bytes: int) -> KeptFile:
    """Of the kept file of this name; nothing where there is none. Raises OSError."""
    try:
        status = os.stat(cache_path(folder, fingerprint=fingerprint, block_bytes=block_bytes))
    except FileNotFoundError:
        return KeptFile(0, 0)
    return KeptFile(max(0, status.st_size - PAGE_BYTES) // frame_stride(block_bytes), status.st_blocks * 512)


def read_superblock(file_descriptor: int) -> Superblock | None:
    """None where the first page is not a superblock that checks out."""
    page = os.pread(file_descriptor, PAGE_BYTES, 0)
    if len(page) < _FIELDS.size + _CHECKSUM.size or page[: len(_MAGIC)] != _MAGIC:
        return None
    if _CHECKSUM.unpack_from(page, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(page[: _FIELDS.size]):
        return None
    _magic, fingerprint, block_bytes, stride = _FIELDS.unpack_from(page, 0)
    return Superblock(fingerprint, block_bytes) if stride == frame_stride(block_bytes) else None


def open_store_file(
    folder: Path, *, fingerprint: bytes, block_bytes: int, num_slots: int, persist: bool, direct: bool = True
) -> StoreFile:
    """Open or make the file with room for `num_slots` blocks, or for as many as the file system can hold with 5 % of
    what is free, or the file's already, to spare.

    Raises StorageError where the folder cannot be written at all.
    """
    notes: list[str] = []
    file_descriptor, path = -1, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if persist:
            path = cache_path(folder, fingerprint=fingerprint, block_bytes=block_bytes)
            file_descriptor = _open_locked(path, fingerprint=fingerprint, notes=notes)
        if file_descriptor < 0:
            path, file_descriptor = None, _open_private(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot keep blocks here: {error.strerror}") from error
    stored = read_superblock(file_descriptor)
    is_fresh = stored is None or stored.block_bytes != block_bytes
    try:
        if is_fresh:
            os.ftruncate(file_descriptor, 0)
        num_slots = _make_room(file_descriptor, num_slots=num_slots, stride=frame_stride(block_bytes), notes=notes)
        if is_fresh:
            _write_superblock(file_descriptor, fingerprint=fingerprint, block_bytes=block_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            os.close(file_descriptor)
            raise StorageError(f"{folder}: cannot keep blocks here: {error.strerror}") from error
        num_slots = 0
        notes.append("no space for a single block")
    is_direct = direct and _set_direct(file_descriptor)
    if direct and not is_direct:
        notes.append("O_DIRECT refused")
    return StoreFile(
        file_descriptor=file_descriptor,
        path=path,
        is_direct=is_direct,
        num_slots=num_slots,
        is_fresh=is_fresh,
        notes=tuple(notes),
    )


def _open_locked(path: Path, *, fingerprint: bytes, notes: list[str]) -> int:
    """The kept file, locked; -1 where it is another's for now."""
    while True:
        file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        refusal = _lock(file_descriptor)
        if refusal:
            os.close(file_descriptor)
            notes.append(f"{path.name}: {refusal}, a private file is used")
            return -1
        stored = read_superblock(file_descriptor)
        if stored is not None and stored.fingerprint != fingerprint:
            os.close(file_descriptor)
            notes.append(f"{path.name}: holds another model's blocks, a private file is used")
            return -1
        try:
            if os.path.samestat(os.stat(path), os.fstat(file_descriptor)):
                return file_descriptor
        except FileNotFoundError:
            pass
        os.close(file_descriptor)  # removed between open and lock: what we hold has no name any more


def _lock(file_descriptor: int) -> str:
    """Lock the file for this process; why not, where it cannot be.

    Tried for a moment: the kernel ends a killed process's I/O, and with it frees its lock, shortly after its death.
    """
    deadline_s = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ""
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return "held by another process"
            time.sleep(0.01)
        except OSError as error:
            return f"cannot be locked ({error.strerror})"


def _open_private(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    file_descriptor, name = tempfile.mkstemp(suffix=".tmp", prefix="kv-", dir=folder)
    os.unlink(name)
    return file_descriptor


def _make_room(file_descriptor: int, *, num_slots: int, stride: int, notes: list[str]) -> int:
    """Set the file's length and reserve its blocks; the number of slots that got room."""
    size = os.fstat(file_descriptor)
    space = os.fstatvfs(file_descriptor)
    # A share of the free space alone would leave less each time that a kept file is opened.
    own_bytes = size.st_blocks * 512
    most_bytes = int((space.f_bavail * space.f_frsize + own_bytes) * (1 - _FREE_SPACE_KEPT))
    num_fitting = max(0, (most_bytes - PAGE_BYTES) // stride)
    if num_fitting < num_slots:
        notes.append(f"room for {num_fitting} of {num_slots} blocks")
        num_slots = num_fitting
    length = slot_offset(num_slots, stride=stride)
    if length < size.st_size:
        os.ftruncate(file_descriptor, length)
    code = _reserve(file_descriptor, length)
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOSPC, errno.EDQUOT):
        # Not reserved: each write finds out for itself, and a failed one is a store that did not happen.
        notes.append(f"not preallocated ({os.strerror(code)})")
        os.ftruncate(file_descriptor, length)
    elif code:
        raise OSError(code, os.strerror(code))
    return num_slots


def _reserve(file_descriptor: int, length: int) -> int:
    """Reserve the file's blocks up to `length`; 0 or an errno.

    The system call itself: where a file system has none, `os.posix_fallocate` would write to every block instead.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(file_descriptor, 0, ctypes.c_long(0), ctypes.c_long(length)) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0


def _write_superblock(file_descriptor: int, *, fingerprint: bytes, block_bytes: int) -> None:
    page = bytearray(PAGE_BYTES)
    _FIELDS.pack_into(page, 0, _MAGIC, fingerprint, block_bytes, frame_stride(block_bytes))
    _CHECKSUM.pack_into(page, _FIELDS.size, xxhash.xxh3_64_intdigest(page[: _FIELDS.size]))
    if os.pwrite(file_descriptor, page, 0) != PAGE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file_descriptor)


def _set_direct(file_descriptor: int) -> bool:
    """Switch the open file to O_DIRECT and prove it with one read; else leave it buffered."""
    flags = fcntl.fcntl(file_descriptor, fcntl.F_GETFL)
    frame = Frames(num_frames=1, block_bytes=PAGE_BYTES).take()
    assert frame is not None
    try:
        fcntl.fcntl(file_descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file_descriptor, [frame.payload], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(file_descriptor, fcntl.F_SETFL, flags)
        return False
    return True
