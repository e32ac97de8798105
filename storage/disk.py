"""Blocks in one file: which block lies in which slot.

The index lives in memory, on the caller's thread; it is rebuilt from the slots' own headers when a kept file is
opened, so it cannot disagree with them after a crash. A slot being written has no block until the write has ended,
and a slot being read is not written before the last read has ended.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchllm.storage.disk_io import IoThread, Request
from batchllm.storage.frame import CopyChecksum, Frame, Header, copy_checksum, frame_stride
from batchllm.storage.ring import open_queue
from batchllm.storage.slot_scan import SlotScan
from batchllm.storage.store_file import open_store_file, slot_offset
from batchllm.storage.submission import SubmissionQueue
from batchllm.storage.tier import MissCause, Outcome, TierCounters, Transfer, TransferKind, payload_view

log = logging.getLogger("batchllm.storage")


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a disk tier is kept and driven. Times in seconds.

    `persist` keeps the file, under a name made from the fingerprint; slots older than `max_age_s` are then free at
    start. After a failed write stores are refused for `retry_after_s`, twice as long after each further one, up to
    `max_retry_after_s`.
    """

    persist: bool = False
    depth: int = 32
    direct: bool = True
    max_age_s: float | None = None
    retry_after_s: float = 1.0
    max_retry_after_s: float = 60.0


class DiskTier:
    """Up to `num_slots` blocks under `folder`, fewer where the file system has no room: see `num_slots` and `backend`.

    `fingerprint` (32 bytes) names the model and layout whose blocks these are. `open_submissions` is the queue's
    maker, for tests that inject faults; `clock` gives unix time for headers and ages. StorageError where the folder
    cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: bytes,
        block_bytes: int,
        num_slots: int,
        options: DiskOptions | None = None,
        open_submissions: Callable[[int, int], tuple[SubmissionQueue, str]] = open_queue,
        copy_checksum: CopyChecksum = copy_checksum,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if len(fingerprint) != 32:
            raise ValueError(f"a fingerprint has 32 bytes, this one {len(fingerprint)}")
        if num_slots < 0 or block_bytes < 1:
            raise ValueError(f"{num_slots} slots of {block_bytes} bytes")
        self.options = options or DiskOptions()
        self.block_bytes = block_bytes
        self.stride = frame_stride(block_bytes)
        self._file = open_store_file(
            folder,
            fingerprint=fingerprint,
            block_bytes=block_bytes,
            num_slots=num_slots,
            persist=self.options.persist,
            direct=self.options.direct,
        )
        self.num_slots = self._file.num_slots
        self.path = self._file.path
        self._counters = TierCounters()
        self._index: dict[bytes, int] = {}
        self._num_readers: dict[int, int] = {}
        self._blocked_writes: dict[int, Request] = {}
        self._storing: dict[bytes, list[Transfer]] = {}
        self._finished: list[Transfer] = []
        self._generation = 1
        self._refuse_until_s = 0.0
        self._refusal_errno = 0
        self._retry_after_s = self.options.retry_after_s
        self._is_closed = False
        notes = list(self._file.notes)
        names: list[str] = []

        def open_on_thread() -> SubmissionQueue:
            submissions, note = open_submissions(self._file.file_descriptor, self.options.depth)
            names.append(submissions.name)
            if note:
                notes.append(note)
            return submissions

        scan = None if self._file.is_fresh else SlotScan(self.num_slots)
        self._io = IoThread(
            open_on_thread,
            depth=self.options.depth,
            block_bytes=block_bytes,
            fingerprint=fingerprint,
            is_direct=self._file.is_direct,
            scan=scan,
            copy_checksum=copy_checksum,
            clock=clock,
        )
        if self._io.failure is not None:
            notes.append(f"off: {self._io.failure}")
        access = "O_DIRECT" if self._file.is_direct else "buffered"
        self.backend = f"{names[0] if names else 'none'}, {access}" + "".join(f"; {note}" for note in notes)
        if notes:
            log.warning("disk tier in %s: %s", folder, self.backend)
        oldest_s = clock() - self.options.max_age_s if self.options.max_age_s is not None else None
        self._adopt(scan.headers if scan else {}, fingerprint=fingerprint, oldest_s=oldest_s)
        self._free = deque(sorted(set(range(self.num_slots)) - set(self._index.values())))

    @property
    def counters(self) -> TierCounters:
        self._counters.busy_s = self._io.busy_s
        return self._counters

    @property
    def cpu_s(self) -> float:
        """CPU seconds the I/O thread has used, checksums included."""
        return self._io.cpu_s

    @property
    def depth(self) -> int:
        return self.options.depth

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def is_refusing(self) -> bool:
        """Whether stores are refused for now because writes failed."""
        return time.monotonic() < self._refuse_until_s

    def keys(self) -> list[bytes]:
        """The blocks that can be found now; after opening a kept file, those of earlier runs."""
        return list(self._index)

    def contains(self, key: bytes) -> bool:
        return key in self._index

    def store(self, key: bytes, data: memoryview | Frame, *, replace: bytes | None = None) -> Transfer:
        payload_view(data, block_bytes=self.block_bytes)
        transfer = Transfer(TransferKind.STORE, key, self.block_bytes)
        self._counters.begin(transfer)
        if key in self._index:
            return self._end(transfer, Outcome.DONE)
        if key in self._storing:
            self._storing[key].append(transfer)
            return transfer
        if self.is_refusing:
            transfer.errno = self._refusal_errno
            return self._end(transfer, Outcome.FAILED)
        if self._free:
            slot = self._free.popleft()
        elif replace in self._index:
            slot = self._index.pop(replace)
        else:
            return self._end(transfer, Outcome.FULL)
        self._storing[key] = []
        request = Request(transfer, data, slot, slot_offset(slot, stride=self.stride), generation=self._generation)
        self._generation += 1
        if self._num_readers.get(slot):
            self._blocked_writes[slot] = request
        else:
            self._io.submit(request)
        return transfer

    def load(self, key: bytes, into: memoryview | Frame) -> Transfer:
        payload_view(into, block_bytes=self.block_bytes)
        transfer = Transfer(TransferKind.LOAD, key, self.block_bytes)
        self._counters.begin(transfer)
        slot = self._index.get(key)
        if slot is None:
            transfer.cause = MissCause.ABSENT
            return self._end(transfer, Outcome.MISS)
        self._num_readers[slot] = self._num_readers.get(slot, 0) + 1
        self._io.submit(Request(transfer, into, slot, slot_offset(slot, stride=self.stride)))
        return transfer

    def poll(self, timeout_s: float = 0.0) -> list[Transfer]:
        self._io.hurry()
        may_wait = timeout_s > 0 and not self._finished and self._counters.num_in_flight > 0
        while True:
            try:
                request = self._io.finished.get(timeout=timeout_s) if may_wait else self._io.finished.get_nowait()
            except queue.Empty:
                break
            may_wait = False
            if request.transfer.kind is TransferKind.STORE:
                self._end_store(request)
            else:
                self._end_load(request)
        self._io.hurry()  # a load that ended may have let a write begin
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        while self._blocked_writes:
            self._finished = self.poll(timeout_s=1.0) + self._finished
        self._io.close()
        self._finished = self.poll()
        os.close(self._file.file_descriptor)

    def check_integrity(self) -> None:
        """Each slot is free, holds one block, or is being written. Only while nothing is in flight can the last be
        none.
        """
        used = list(self._index.values())
        assert len(set(used)) == len(used), "two blocks share a slot"
        assert not set(used) & set(self._free), "a free slot holds a block"
        assert len(used) + len(self._free) + len(self._storing) == self.num_slots, "a slot is lost"
        if self._counters.num_in_flight == 0:
            assert not self._storing and not self._num_readers and not self._blocked_writes

    def _adopt(self, headers: dict[int, Header], *, fingerprint: bytes, oldest_s: float | None) -> None:
        """Index the blocks of an earlier run: ours, whole as far as the header tells, and young enough; the newest of
        a key.
        """
        newest: dict[bytes, tuple[int, int]] = {}
        for slot, header in headers.items():
            self._generation = max(self._generation, header.generation + 1)
            if header.fingerprint != fingerprint or header.payload_bytes != self.block_bytes:
                continue
            if oldest_s is not None and header.written_s < oldest_s:
                continue
            newest[header.key] = max(newest.get(header.key, (0, -1)), (header.generation, slot))
        self._index = {key: slot for key, (_generation, slot) in newest.items()}

    def _end_store(self, request: Request) -> None:
        transfer, slot = request.transfer, request.slot
        followers = self._storing.pop(transfer.key)
        if request.outcome is Outcome.DONE:
            self._index[transfer.key] = slot
            self._retry_after_s = self.options.retry_after_s
        else:
            self._free.append(slot)
            self._refuse(request.errno)
        for ended in (transfer, *followers):
            ended.outcome, ended.errno = request.outcome, request.errno
            self._counters.end(ended)
            self._finished.append(ended)

    def _end_load(self, request: Request) -> None:
        transfer, slot = request.transfer, request.slot
        transfer.outcome, transfer.cause, transfer.errno = request.outcome, request.cause, request.errno
        self._num_readers[slot] -= 1
        if transfer.outcome is not Outcome.DONE and self._index.get(transfer.key) == slot:
            del self._index[transfer.key]
            self._free.append(slot)
        if self._num_readers[slot] == 0:
            del self._num_readers[slot]
            if (blocked := self._blocked_writes.pop(slot, None)) is not None:
                self._io.submit(blocked)
        self._counters.end(transfer)
        self._finished.append(transfer)

    def _refuse(self, code: int) -> None:
        """Stop taking stores for a while; said once for each spell of failures, tried again by itself."""
        if self.is_refusing:
            return
        if self._retry_after_s == self.options.retry_after_s:
            log.warning("disk tier: writing failed (%s), blocks are not stored for a while", os.strerror(code))
        self._refusal_errno = code
        self._refuse_until_s = time.monotonic() + self._retry_after_s
        self._retry_after_s = min(2 * self._retry_after_s, self.options.max_retry_after_s)

    def _end(self, transfer: Transfer, outcome: Outcome) -> Transfer:
        transfer.outcome = outcome
        self._counters.end(transfer)
        self._finished.append(transfer)
        return transfer
