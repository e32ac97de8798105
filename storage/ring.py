"""The submission queue on io_uring, and the choice between it and threads."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
from collections.abc import Callable

from batchllm.storage.liburing import OPCODE_READ, OPCODE_WRITE, Ring
from batchllm.storage.submission import Completion, OpenQueue, Operation, SubmissionQueue
from batchllm.storage.threads_io import ThreadQueue

_SYS_IO_URING_SETUP = 425  # the same on x86-64, arm64 and riscv
_WAKE_TAG = 0
_COMPLETIONS_AT_ONCE = 4
_TRY_AGAIN = (errno.EAGAIN, errno.EBUSY, errno.EINTR)


class UringQueue:
    """io_uring on `file_descriptor`, for up to `depth` operations in flight. OSError where the kernel refuses.

    Operations collect in the submission ring and go to the kernel together. What it refuses for now (EAGAIN, EBUSY,
    EINTR) stays in the ring: it is not queued again, only submitted again.
    """

    name = "io_uring"

    def __init__(self, file_descriptor: int, depth: int) -> None:
        num_entries = depth + 1  # never full: one more is for the wake
        check_uring_setup(num_entries)
        self._fd = file_descriptor
        self._ring = Ring(num_entries)
        if not all(self._ring.supports(code) for code in (OPCODE_READ, OPCODE_WRITE)):
            self._ring.close()
            raise OSError(errno.EOPNOTSUPP, "this kernel's io_uring has no plain read and write")
        self._depth = depth
        self._num_in_flight = 0
        self._num_queued = 0
        # A read of this counter is always in the ring, so that one wait covers completions and new requests alike.
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake_buffer = ctypes.c_uint64()
        self._wake_operation = Operation(
            tag=_WAKE_TAG,
            is_write=False,
            view=memoryview(self._wake_buffer).cast("B"),
            address=ctypes.addressof(self._wake_buffer),
            offset=0,
        )
        self._arm_wake()

    def submit(self, operation: Operation) -> None:
        self._ring.queue(OPCODE_WRITE if operation.is_write else OPCODE_READ, self._fd, operation)
        self._num_in_flight += 1
        self._num_queued += 1

    def begin(self) -> None:
        while self._num_queued and self._hand_over(self._ring.submit):
            pass

    def wait(self) -> list[Completion]:
        completions: list[Completion] = []
        woken = self._reap(completions)
        while not completions and not woken:
            taken = self._hand_over(self._submit_and_wait)
            woken = self._reap(completions)
            if not taken and self._num_queued and not completions and not woken:
                # The kernel is out of room and nothing has completed: give it a moment, it may not owe us a completion.
                time.sleep(0.001)
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
        self._ring.queue(OPCODE_READ, self._wake_fd, self._wake_operation)
        self._num_queued += 1

    def _submit_and_wait(self) -> int:
        # With a deep queue the disk has enough to do while a few more complete, and one wake serves them all.
        return self._ring.submit_and_wait(
            _COMPLETIONS_AT_ONCE if 2 * self._num_in_flight > max(self._depth, 2 * _COMPLETIONS_AT_ONCE) else 1
        )

    def _hand_over(self, submit: Callable[[], int]) -> bool:
        """Whether the kernel took something of what is queued."""
        try:
            num_taken = submit()
        except OSError as error:
            if error.errno not in _TRY_AGAIN:
                raise
            return False
        self._num_queued -= num_taken
        return num_taken > 0

    def _reap(self, completions: list[Completion]) -> bool:
        """Collect what has completed without waiting; whether a wake was among it."""
        woken = False
        while (pair := self._ring.peek()) is not None:
            tag, result = pair
            if tag == _WAKE_TAG:
                self._arm_wake()
                woken = True
            else:
                self._num_in_flight -= 1
                completions.append(Completion(tag, result))
        return woken


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
