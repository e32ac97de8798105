from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchllm.storage.disk import DiskTier
from batchllm.storage.frame import Frame, Frames
from batchllm.storage.liburing import Ring
from batchllm.storage.ring import UringQueue, check_uring_setup, open_queue
from batchllm.storage.submission import Operation, SubmissionQueue
from batchllm.storage.threads_io import ThreadQueue


def open_uring(file_descriptor: int, depth: int) -> SubmissionQueue:
    try:
        return UringQueue(file_descriptor, depth)
    except OSError as error:
        pytest.skip(f"this machine refuses io_uring: {error}")


@pytest.fixture
def frames() -> Frames:
    return Frames(num_frames=8, block_bytes=8192)


@pytest.fixture
def file_descriptor(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, bytes(range(256)) * 4096, 0)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(params=[open_uring, ThreadQueue], ids=["io_uring", "threads"])
def submissions(request: pytest.FixtureRequest, file_descriptor: int) -> Iterator[SubmissionQueue]:
    queue = request.param(file_descriptor, 8)
    yield queue
    queue.close()


def operation(tag: int, frame: Frame, *, is_write: bool = False, offset: int = 0) -> Operation:
    return Operation(tag=tag, is_write=is_write, view=frame.whole, address=frame.address, offset=offset)


def wait_for(queue: SubmissionQueue, num: int) -> dict[int, int]:
    results: dict[int, int] = {}
    deadline_s = time.monotonic() + 10
    while len(results) < num and time.monotonic() < deadline_s:
        results.update(queue.wait())
    return results


def test_reads_bring_the_bytes_at_their_offsets(submissions: SubmissionQueue, frames: Frames) -> None:
    taken = [frame for frame in iter(frames.take, None) if frame is not None]
    for tag, frame in enumerate(taken, start=1):
        submissions.submit(operation(tag, frame, offset=tag))
    assert wait_for(submissions, 8) == {tag: 12_288 for tag in range(1, 9)}
    assert [frame.whole[0] for frame in taken] == list(range(1, 9))


def test_operations_go_to_the_kernel_together_when_begun(file_descriptor: int, frames: Frames) -> None:
    queue = open_uring(file_descriptor, 8)
    assert isinstance(queue, UringQueue)
    taken = [frame for frame in iter(frames.take, None) if frame is not None]
    for tag, frame in enumerate(taken, start=1):
        frame.whole[:1] = b"x"
        queue.submit(operation(tag, frame, offset=tag))
    assert [frame.whole[0] for frame in taken] == [ord("x")] * 8
    queue.begin()
    assert wait_for(queue, 8) == {tag: 12_288 for tag in range(1, 9)}
    queue.close()


def test_a_queue_serves_many_times_its_depth(submissions: SubmissionQueue, frames: Frames) -> None:
    frame = frames.take()
    assert frame is not None
    for tag in range(1, 101):
        submissions.submit(operation(tag, frame, offset=tag))
        assert wait_for(submissions, 1) == {tag: 12_288}
        assert frame.whole[0] == tag


def test_a_write_is_there_for_a_later_read(submissions: SubmissionQueue, frames: Frames, file_descriptor: int) -> None:
    frame = frames.take()
    assert frame is not None
    frame.whole[:] = b"x" * 12_288
    submissions.submit(operation(1, frame, is_write=True, offset=4096))
    assert wait_for(submissions, 1) == {1: 12_288}
    assert os.pread(file_descriptor, 12_288, 4096) == b"x" * 12_288


def test_reading_past_the_end_moves_nothing(submissions: SubmissionQueue, frames: Frames) -> None:
    frame = frames.take()
    assert frame is not None
    submissions.submit(operation(1, frame, offset=1 << 30))
    assert wait_for(submissions, 1) == {1: 0}


def test_a_wake_from_another_thread_ends_a_wait(submissions: SubmissionQueue) -> None:
    timer = threading.Timer(0.05, submissions.wake)
    timer.start()
    assert submissions.wait() == []
    timer.join()


def test_wakes_before_a_wait_are_not_lost(submissions: SubmissionQueue) -> None:
    for _ in range(5):
        submissions.wake()
        assert submissions.wait() == []


class RefusingRing:
    """A ring whose submissions are refused for now: as with liburing, the operations stay in the ring."""

    def __init__(self, ring: Ring, *, codes: list[int]) -> None:
        self._ring = ring
        self.codes = codes
        self.num_queued = 0

    def queue(self, opcode: int, file_descriptor: int, operation: Operation) -> None:
        self.num_queued += 1
        self._ring.queue(opcode, file_descriptor, operation)

    def submit(self) -> int:
        self._refuse()
        return self._ring.submit()

    def submit_and_wait(self, num_completions: int) -> int:
        self._refuse()
        return self._ring.submit_and_wait(num_completions)

    def _refuse(self) -> None:
        if self.codes:
            code = self.codes.pop()
            raise OSError(code, os.strerror(code))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
def test_a_refused_submission_is_submitted_again_and_never_twice(
    file_descriptor: int, frames: Frames, code: int
) -> None:
    queue = open_uring(file_descriptor, 8)
    assert isinstance(queue, UringQueue)
    refusing = RefusingRing(queue._ring, codes=[code] * 7)
    queue._ring = refusing  # type: ignore[assignment]
    taken = [frame for frame in iter(frames.take, None) if frame is not None]
    for tag, frame in enumerate(taken, start=1):
        queue.submit(operation(tag, frame, offset=tag))
    queue.begin()
    seen: list[int] = []
    while len(seen) < 8:
        seen += [completion.tag for completion in queue.wait()]
    queue.wake()
    seen += [completion.tag for completion in queue.wait()]
    assert sorted(seen) == list(range(1, 9))
    # One for each operation, and some for the wake: that of the first arming, and one for each time it was seen.
    assert refusing.codes == [] and 8 <= refusing.num_queued <= 10
    queue.close()


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_a_refused_ring_falls_back_to_threads_and_says_why(file_descriptor: int, code: int) -> None:
    def refuse(_file_descriptor: int, _depth: int) -> SubmissionQueue:
        raise OSError(code, os.strerror(code))

    queue, reason = open_queue(file_descriptor, 4, open_uring=refuse)
    assert queue.name == "threads"
    assert reason == f"io_uring refused: {errno.errorcode[code]}"
    queue.close()


def test_a_tier_over_threads_names_its_backend_and_keeps_blocks(tmp_path: Path, finish: Callable[..., None]) -> None:
    def refuse(file_descriptor: int, depth: int) -> tuple[SubmissionQueue, str]:
        def never(_file_descriptor: int, _depth: int) -> SubmissionQueue:
            raise OSError(errno.ENOMEM, "memory")

        return open_queue(file_descriptor, depth, open_uring=never)

    tier = DiskTier(tmp_path, fingerprint=bytes(32), block_bytes=100, num_slots=2, open_submissions=refuse)
    data, into = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    finish(tier, tier.store(b"k" * 32, memoryview(data)))
    finish(tier, tier.load(b"k" * 32, memoryview(into)))
    assert tier.backend.startswith("threads, ") and "io_uring refused: ENOMEM" in tier.backend
    assert np.array_equal(data, into)
    tier.close()


SANDBOXED = """
import ctypes, struct, sys
from pathlib import Path
# A filter like a container's: io_uring_setup (425) fails with the errno given, all else is allowed.
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | int(sys.argv[1])), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
program = struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) != 0:
    print("no seccomp")
    sys.exit()
from batchllm.storage.disk import DiskTier
tier = DiskTier(Path(sys.argv[2]), fingerprint=bytes(32), block_bytes=100, num_slots=2)
data, into = bytes(range(100)), bytearray(100)
tier.store(b"k" * 32, memoryview(data))
while not tier.contains(b"k" * 32):
    tier.poll(timeout_s=1)
loaded = tier.load(b"k" * 32, memoryview(into))
while not loaded.done:
    tier.poll(timeout_s=1)
print(loaded.outcome.value, bytes(into) == data, tier.backend)
tier.close()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_under_a_containers_filter_blocks_still_come_back(tmp_path: Path, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SANDBOXED, str(code), str(tmp_path)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    if output.startswith("no seccomp"):
        pytest.skip("this machine allows no seccomp filter")
    assert output.startswith("done True threads, ")
    assert f"io_uring refused: {errno.errorcode[code]}" in output


def test_the_probe_leaves_no_descriptor_behind() -> None:
    try:
        check_uring_setup()
    except OSError as error:
        pytest.skip(f"this machine refuses io_uring: {error}")
    num_descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        check_uring_setup()
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
