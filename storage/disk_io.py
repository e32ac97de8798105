"""The I/O thread of a disk tier: it alone touches the queue, and everything it is given stays its own until it
reports it.

For a store it seals the frame, writes header and payload as one operation and reports the end; for a load it reads
the frame, and reports bytes only if the seal has proved that these are the ones asked for (`storage/seal`).
What does not lie in a frame of the caller's goes through a bounce frame of the thread's own, so cached blocks and I/O
never compete for memory.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from batchllm.storage.frame import PAGE_BYTES, CopyChecksum, Frame, Frames
from batchllm.storage.seal import Identity, seal, unseal
from batchllm.storage.slot_scan import SlotScan, read_headers
from batchllm.storage.submission import Completion, Operation, SubmissionQueue
from batchllm.storage.tier import MissCause, Outcome, Transfer, TransferKind

log = logging.getLogger("batchllm.storage")

MAX_RETRIES = 256
_TRY_AGAIN = (errno.EAGAIN, errno.EBUSY, errno.EINTR)
_PAUSE_S = 0.001
_GROUP = 8


@dataclass(slots=True, eq=False)
class Request:
    """A block's way to or from its slot. The tier fills the first part; the I/O thread the rest."""

    transfer: Transfer
    buffer: memoryview | Frame
    slot: int
    offset: int
    generation: int = 0
    frame: Frame | None = None
    num_moved: int = 0
    num_retries: int = 0
    outcome: Outcome | None = None
    cause: MissCause | None = None
    errno: int = 0


class IoThread:
    """Runs requests with up to `depth` of them in flight. `open_queue` is called on the thread itself.

    `finished` gets each request when it has ended, its outcome set. If the thread itself fails, every
    request it holds and every later one ends in FAILED, and `failure` holds the reason.
    """

    def __init__(
        self,
        open_queue: Callable[[], SubmissionQueue],
        *,
        depth: int,
        block_bytes: int,
        fingerprint: bytes,
        is_direct: bool,
        scan: SlotScan | None,
        copy_checksum: CopyChecksum,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.finished: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.failure: Exception | None = None
        self.busy_s = 0.0
        self.cpu_s = 0.0
        self._open_queue = open_queue
        self._depth = depth
        self._fingerprint = fingerprint
        self._granule = PAGE_BYTES if is_direct else 1
        self._scan = scan
        self._copy_checksum = copy_checksum
        self._clock = clock
        # Requests go to the kernel in groups while that many are under way: each wake, system call and ring of the disk's
        # bell then serves several, and the disk still never lacks work.
        self._group = max(1, min(_GROUP, depth // 4))
        self._bounce = Frames(num_frames=2 * depth, block_bytes=block_bytes)  # in flight, and landed
        self._stride = self._bounce.stride
        self._inbox: deque[Request] = deque()
        self._in_flight: dict[int, Request] = {}
        self._landed: deque[Request] = deque()
        self._again: deque[Request] = deque()
        self._handled: Request | None = None  # taken from one of the above and not yet in another
        self._next_tag = 1
        self._is_closing = False
        self._is_idle = False
        self._queue: SubmissionQueue | None = None
        self._lock = threading.Lock()  # guards the hand-over between `submit` and a thread that ends
        self._has_ended = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batchllm-disk", daemon=True)
        self._thread.start()
        self._ready.wait()

    def submit(self, request: Request) -> None:
        """Hand over a request; from the tier's thread.

        The thread is woken for a load, and for stores once they make a group; see `hurry`.
        """
        with self._lock:
            if not self._has_ended:
                self._inbox.append(request)
                if request.transfer.kind is TransferKind.LOAD or len(self._inbox) >= self._group:
                    self._wake()
                return
        self._finish_io_error(request, errno.EIO)

    def hurry(self) -> None:
        """See to it that what was handed over is begun as far as that keeps the disk busy; from the tier's thread."""
        if self._inbox and self._is_idle and len(self._in_flight) < self._group:
            with self._lock:
                if not self._has_ended:
                    self._wake()

    def _wake(self) -> None:
        # Awake or with all of its depth in flight, the thread finds requests by itself.
        if self._is_idle and self._queue is not None:
            self._is_idle = False
            self._queue.wake()

    def close(self) -> None:
        """End all requests, then the thread."""
        with self._lock:
            self._is_closing = True
            if self._queue is not None and not self._has_ended:
                self._queue.wake()
        self._thread.join()

    # Everything below runs on the thread.

    def _run(self) -> None:
        try:
            self._queue = self._open_queue()
            if self._scan is not None:
                read_headers(self._scan, self._queue, self._bounce, depth=self._depth)
            self._ready.set()
            self._serve(self._queue)
        except Exception as error:
            self.failure = error
            log.exception("the disk tier's thread failed; the tier is off")
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
        if self._queue is not None:
            try:
                self._queue.close()  # waits for the kernel to let go of every buffer
            except Exception as error:
                # Whoever waits for a request must hear of its end all the same.
                self.failure = self.failure or error
                log.exception("the disk tier's queue could not be closed")
        held = {
            id(request): request for request in (*self._in_flight.values(), *self._landed, *self._again, *self._inbox)
        }
        if self._handled is not None:
            held[id(self._handled)] = self._handled
        for request in held.values():
            if request.outcome is None:
                self._finish_io_error(request, errno.EIO)
        self._in_flight.clear()
        self._landed.clear()
        self._again.clear()
        self._inbox.clear()
        self._ready.set()

    def _serve(self, submissions: SubmissionQueue) -> None:
        while True:
            self._start_all(submissions)
            if not self._in_flight:
                if self._again:
                    time.sleep(_PAUSE_S)  # refused with nothing under way: no completion will come to wait for
                    continue
                if self._is_closing and not self._inbox:
                    return
            began_s = time.monotonic()
            was_busy = bool(self._in_flight)
            # Set before the last look at the inbox: a request is either seen there or wakes the wait.
            self._is_idle = self._has_room()
            if not self._again and self._may_start():
                continue
            completions = submissions.wait()
            self._is_idle = False
            if was_busy:
                self.busy_s += time.monotonic() - began_s
            for completion in completions:
                self._take(completion)
            if self._landed:
                self._start_all(submissions)  # keep the disk busy while the blocks that landed are checked
                submissions.begin()
            while self._landed:
                self._handled = self._landed.popleft()
                self._complete(self._handled)
            self.cpu_s = time.thread_time()

    def _start_all(self, submissions: SubmissionQueue) -> None:
        """Put in flight what there is room for: first what has to go again, then what is new."""
        if not self._may_start():
            return
        while len(self._in_flight) < self._depth and (self._again or self._inbox):
            is_again = bool(self._again)
            request = self._handled = self._again.popleft() if is_again else self._inbox.popleft()
            if not is_again:
                self._prepare(request)
            if not self._submit(submissions, request):
                return

    def _has_room(self) -> bool:
        num_in_flight = len(self._in_flight)
        return num_in_flight < self._group or num_in_flight + self._group <= self._depth

    def _may_start(self) -> bool:
        """Whether something waits that should go now: not less than a group while the disk has enough to do, but for loads."""
        if self._again:
            return len(self._in_flight) < self._depth
        if not self._inbox or not self._has_room():
            return False
        if len(self._in_flight) < self._group or len(self._inbox) >= self._group:
            return True
        return any(request.transfer.kind is TransferKind.LOAD for request in list(self._inbox))

    def _prepare(self, request: Request) -> None:
        """Give the request its frame; for a store, fill frame and header."""
        if isinstance(request.buffer, Frame):
            request.frame = request.buffer
        else:
            request.frame = self._bounce.take()
            assert request.frame is not None, "there are as many bounce frames as requests in flight and landed"
        if request.transfer.kind is TransferKind.STORE:
            seal(
                request.frame,
                request.buffer,
                Identity(request.transfer.key, self._fingerprint),
                generation=request.generation,
                written_s=self._clock(),
                copy_checksum=self._copy_checksum,
            )

    def _submit(self, submissions: SubmissionQueue, request: Request) -> bool:
        """Whether to go on submitting: not after a refusal, which asks to reap completions first."""
        assert request.frame is not None
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        frame, num_moved = request.frame, request.num_moved
        operation = Operation(
            tag,
            request.transfer.kind is TransferKind.STORE,
            frame.whole[num_moved:] if num_moved else frame.whole,
            frame.address + num_moved,
            request.offset + num_moved,
        )
        try:
            submissions.submit(operation)
        except OSError as error:
            if error.errno in _TRY_AGAIN:
                self._retry(request, error.errno)
            else:
                self._finish_io_error(request, error.errno or errno.EIO)
            return False
        self._in_flight[tag] = request
        return True

    def _take(self, completion: Completion) -> None:
        request = self._handled = self._in_flight.pop(completion.tag)
        result = completion.result
        if -result in _TRY_AGAIN:
            self._retry(request, -result)
        elif result < 0:
            self._finish_io_error(request, -result)
        elif result == 0:
            if request.transfer.kind is TransferKind.LOAD:
                self._finish(request, Outcome.CORRUPT, cause=MissCause.TRUNCATED)
            else:
                self._finish_io_error(request, errno.EIO)
        else:
            # A direct transfer can only go on at a page boundary; what lies beyond the last one is moved again.
            moved = (request.num_moved + result) // self._granule * self._granule
            if request.num_moved + result >= self._stride:
                self._landed.append(request)
                return
            if moved == request.num_moved:
                request.num_retries += 1
            request.num_moved = moved
            if request.num_retries > MAX_RETRIES:
                self._finish_stuck(request)
            else:
                self._again.append(request)

    def _retry(self, request: Request, code: int) -> None:
        request.num_retries += 1
        if request.num_retries > MAX_RETRIES:
            self._finish_io_error(request, code)
        else:
            self._again.append(request)

    def _finish_stuck(self, request: Request) -> None:
        if request.transfer.kind is TransferKind.LOAD:
            self._finish(request, Outcome.CORRUPT, cause=MissCause.TRUNCATED)
        else:
            self._finish_io_error(request, errno.EIO)

    def _complete(self, request: Request) -> None:
        """All bytes have moved: a store is done, a load has to prove itself."""
        assert request.frame is not None
        if request.transfer.kind is TransferKind.STORE:
            self._finish(request, Outcome.DONE)
            return
        identity = Identity(request.transfer.key, self._fingerprint)
        cause = unseal(request.frame, request.buffer, identity, copy_checksum=self._copy_checksum)
        if cause is None:
            self._finish(request, Outcome.DONE)
        else:
            self._finish(request, Outcome.CORRUPT, cause=cause)

    def _finish_io_error(self, request: Request, code: int) -> None:
        cause = MissCause.IO_ERROR if request.transfer.kind is TransferKind.LOAD else None
        self._finish(request, Outcome.FAILED, cause=cause, code=code)

    def _finish(self, request: Request, outcome: Outcome, *, cause: MissCause | None = None, code: int = 0) -> None:
        if request.frame is not None and not isinstance(request.buffer, Frame):
            self._bounce.give_back(request.frame)
        request.frame = None
        request.cause, request.errno, request.outcome = cause, code, outcome
        self.finished.put(request)
