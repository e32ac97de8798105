"""A ring as liburing has it, from the shared library that `pyuring` ships: many operations in one system call.

The binding's own calls submit each operation alone, and each submission then rings the disk's bell: on a virtual disk that alone costs
several microseconds of CPU. Its ring is a `struct io_uring`, and its library exports what lies behind these calls, so operations are
put into the submission ring here and handed over together. The version is pinned; a library that lacks a call is refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Any

from batchllm.storage.submission import Operation

OPCODE_READ = 22
OPCODE_WRITE = 23

# opcode, flags, priority, file descriptor, offset, address, length, read/write flags, user data; then nothing we use
_ENTRY = struct.Struct("=BBHiQQIIQ24x")

# The thread that made the ring is the only one that uses it, and it looks for completions itself: the kernel need not
# interrupt it to post them. TASKRUN_FLAG lets a mere look tell that there are some.
_SETUP_FLAGS = 1 << 12 | 1 << 13 | 1 << 9  # SINGLE_ISSUER, DEFER_TASKRUN (both since Linux 6.1), TASKRUN_FLAG


class Ring:
    """Owns one ring of at least `num_entries` entries; for the thread that makes it. OSError where the kernel refuses."""

    def __init__(self, num_entries: int) -> None:
        from pyuring.native import UringCtx

        try:
            self._context: Any = UringCtx(entries=num_entries, setup_flags=_SETUP_FLAGS)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._context = UringCtx(entries=num_entries)  # an older kernel
        self._handle = ctypes.c_void_p(self._context._ctx)
        path = self._context._lib._name
        # Two ways into one library: calls that only touch the shared rings keep the interpreter's lock, since to give it
        # up and take it back costs more than they do; calls that may sleep give it up.
        quick, slow = ctypes.PyDLL(path), ctypes.CDLL(path)
        try:
            self._get_entry = quick.io_uring_get_sqe
            self._peek = quick.uring_peek_completion
            self._submit = slow.io_uring_submit
            self._submit_and_wait = slow.io_uring_submit_and_wait
        except AttributeError as error:
            self._context.close()
            raise OSError(errno.EOPNOTSUPP, f"{path}: {error}") from error
        self._get_entry.argtypes, self._get_entry.restype = [ctypes.c_void_p], ctypes.c_void_p
        self._peek.argtypes, self._peek.restype = [ctypes.c_void_p] * 3, ctypes.c_int
        self._submit.argtypes, self._submit.restype = [ctypes.c_void_p], ctypes.c_int
        self._submit_and_wait.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        self._submit_and_wait.restype = ctypes.c_int
        self._entries: ctypes.Array[ctypes.c_char] | None = None
        self._num_entries = 1 << (num_entries - 1).bit_length()
        self._first_entry = 0
        self._tag, self._result = ctypes.c_uint64(), ctypes.c_int()
        self._tag_pointer, self._result_pointer = ctypes.addressof(self._tag), ctypes.addressof(self._result)

    def supports(self, opcode: int) -> bool:
        return bool(self._context.probe_opcode_supported(opcode))

    def queue(self, opcode: int, file_descriptor: int, operation: Operation) -> None:
        """Put an operation of this kind into the submission ring; the kernel sees it with the next `submit`. The ring has room."""
        entry = self._get_entry(self._handle)
        assert entry is not None, "the submission ring is full"
        if self._entries is None:
            # The first entry handed out is the first of the array.
            self._first_entry = entry
            self._entries = (ctypes.c_char * (self._num_entries * _ENTRY.size)).from_address(entry)
        tag, _is_write, view, address, offset = operation
        place = entry - self._first_entry
        _ENTRY.pack_into(self._entries, place, opcode, 0, 0, file_descriptor, offset, address, view.nbytes, 0, tag)

    def submit(self) -> int:
        """Hand over what is queued; how many operations the kernel took. OSError: none, they stay queued."""
        return _checked(self._submit(self._handle))

    def submit_and_wait(self, num_completions: int) -> int:
        """`submit`, then sleep until there are so many completions."""
        return _checked(self._submit_and_wait(self._handle, num_completions))

    def peek(self) -> tuple[int, int] | None:
        """(tag, result) of a completion, if there is one."""
        found = self._peek(self._handle, self._tag_pointer, self._result_pointer)
        if found == 0:
            return None
        _checked(found)
        return self._tag.value, self._result.value

    def close(self) -> None:
        self._context.close()


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
