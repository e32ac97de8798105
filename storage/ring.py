"""The submission queue on io_uring, and the choice between it and threads."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time

from batchllm.storage.submission import Completion, OpenQueue, Operation, SubmissionQueue
from batchllm.storage.threads_io import ThreadQueue

_SYS_IO_URING_SETUP = 425  # the same on x86-64, arm64 and riscv
_OPCODE_READ = 22
_OPCODE_WRITE = 23
_WAKE_TAG = 0
_TRY_AGAIN = (errno.EAGAIN, errno.EBUSY, errno.EINTR)


class UringQueue:
    """io_uring on `file_descriptor`, for up to `depth` operations in flight. OSError where the kernel refuses.

    The binding submits each operation as it is queued. When that submission is refused for now (EAGAIN, EBUSY,
    EINTR), the operation already lies in the submission ring: it must not be queued again, only submitted again.
    """

    name = "io_uring"

    def __init__(self, file_descriptor: int, depth: int) -> None:
        # Twice the depth: never full, even with each entry waiting for a second submission.
        num_entries = 2 * depth + 2
        check_uring_setup(num_entries)
        from pyuring.native import UringCtx

        self._fd = file_descriptor
        self._ring = UringCtx(entries=num_entries)
        if not all(self._ring.probe_opcode_supported(code) for code in (_OPCODE_READ, _OPCODE_WRITE)):
            self._ring.close()
            raise OSError(errno.EOPNOTSUPP, "this kernel's io_uring has no plain read and write")
        self._num_in_flight = 0
        self._has_unsubmitted = False
        # A read of this counter is always in the ring, so that one wait covers completions and new requests alike.
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake_buffer = ctypes.c_uint64()
        self._wake_pointer = ctypes.c_void_p(ctypes.addressof(self._wake_buffer))
        self._arm_wake()

    def submit(self, operation: Operation) -> None:
        queue = self._ring.write_async_ptr if operation.is_write else self._ring.read_async_ptr
        self._num_in_flight += 1
        try:
            queue(self._fd, ctypes.c_void_p(operation.address), operation.view.nbytes, operation.offset, operation.tag)
        except OSError as error:
            if error.errno not in _TRY_AGAIN:
                self._num_in_flight -= 1
                raise
            self._has_unsubmitted = True

    def wait(self) -> list[Completion]:
        completions: list[Completion] = []
        woken = self._reap(completions)
        while not completions and not woken:
            if self._has_unsubmitted and not self._submit_again():
                # The kernel is out of room and nothing has completed: give it a moment, it may not owe us a completion.
                time.sleep(0.001)
                woken = self._reap(completions)
                continue
            try:
                woken = self._take(self._ring.wait_completion(), completions)
            except OSError as error:
                if error.errno not in _TRY_AGAIN:
                    raise
            woken = self._reap(completions) or woken
        return completions

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        try:
            while self._num_in_flight:
                self.wait()
        finally:
            self._ring.close()
            os.close(self._wake_fd)

    def _arm_wake(self) -> None:
        try:
            self._ring.read_async_ptr(self._wake_fd, self._wake_pointer, 8, 0, _WAKE_TAG)
        except OSError as error:
            if error.errno not in _TRY_AGAIN:
                raise
            self._has_unsubmitted = True

    def _submit_again(self) -> bool:
        try:
            self._ring.submit()
        except OSError as error:
            if error.errno not in _TRY_AGAIN:
                raise
            return False
        self._has_unsubmitted = False
        return True

    def _reap(self, completions: list[Completion]) -> bool:
        """Collect what has completed without waiting; whether a wake was among it."""
        woken = False
        while (pair := self._ring.peek_completion()) is not None:
            woken = self._take(pair, completions) or woken
        return woken

    def _take(self, pair: tuple[int, int], completions: list[Completion]) -> bool:
        tag, result = pair
        if tag == _WAKE_TAG:
            self._arm_wake()
            return True
        self._num_in_flight -= 1
        completions.append(Completion(tag, result))
        return False


def check_uring_setup(num_entries: int = 4) -> None:
    """Raise the OSError with which the kernel refuses a ring, if it does; the binding itself loses the errno."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, "io_uring is Linux only")
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(256)
    descriptor = libc.syscall(_SYS_IO_URING_SETUP, num_entries, parameters)
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"io_uring_setup: {os.strerror(code)}")
    os.close(descriptor)


def open_queue(file_descriptor: int, depth: int, *, open_uring: OpenQueue = UringQueue) -> tuple[SubmissionQueue, str]:
    """The best queue this machine allows, and why it is not io_uring where it is not (else an empty string)."""
    try:
        return open_uring(file_descriptor, depth), ""
    except (OSError, ImportError) as error:
        code = getattr(error, "errno", None)
        reason = errno.errorcode.get(code, str(code)) if code is not None else f"{error}"
        return ThreadQueue(file_descriptor, depth), f"io_uring refused: {reason}"
