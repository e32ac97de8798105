"""The submission queue where io_uring is refused: `preadv` and `pwritev` on a few threads."""

from __future__ import annotations

import errno
import os
import queue
import threading

from batchllm.storage.submission import Completion, Operation

_MAX_THREADS = 16  # enough to keep a disk busy with blocks of some hundred kilobytes


class ThreadQueue:
    """Reads and writes `file_descriptor` on up to `depth` (at most 16) threads."""

    name = "threads"

    def __init__(self, file_descriptor: int, depth: int) -> None:
        self._fd = file_descriptor
        self._requests: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._completions: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._num_in_flight = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"batchllm-disk-{index}", daemon=True)
            for index in range(min(depth, _MAX_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, operation: Operation) -> None:
        self._num_in_flight += 1
        self._requests.put(operation)

    def begin(self) -> None:
        """Nothing to do: each operation went to a thread as it came."""

    def wait(self) -> list[Completion]:
        completions: list[Completion] = []
        item = self._completions.get()
        while True:
            if item is not None:
                self._num_in_flight -= 1
                completions.append(item)
            try:
                item = self._completions.get_nowait()
            except queue.Empty:
                return completions

    def wake(self) -> None:
        self._completions.put(None)

    def close(self) -> None:
        while self._num_in_flight:
            self.wait()
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (operation := self._requests.get()) is not None:
            try:
                move = os.pwritev if operation.is_write else os.preadv
                result = move(self._fd, [operation.view], operation.offset)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            except Exception:
                # A bug, not a fault of the disk: whoever waits must hear of it, and this thread must not hide it.
                self._completions.put(Completion(operation.tag, -errno.EIO))
                raise
            self._completions.put(Completion(operation.tag, result))
