"""Input cells that are carried to the output: staged while the input is read once, looked up by row when it is done."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchllm.errors import OutputError

# Rows finish in the plan's order, not the input's, so a look-up touches scattered rows: small batches bound what
# is read beside the rows that are wanted.
_MAX_BATCH_ROWS = 64
_MAX_BATCH_BYTES = 128 * 1024


class KeptRows:
    """Owns one file of Arrow IPC messages. Appended by one thread; rows already appended can be read by another.

    Read with `pread`, not `mmap`: mapped pages count as resident memory, and a truncated file would be a signal.
    """

    def __init__(self, folder: Path, *, schema: pa.Schema) -> None:
        """Creates the file. `schema` is that of the cells as they are written to the output."""
        self.schema = schema
        self._fd = os.open(folder / "kept.arrow", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._first_rows: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._end = 0
        self.num_rows = 0

    def append(self, batch: pa.RecordBatch) -> None:
        """Adds the next rows of the input. Raises OutputError when the disk is full."""
        rows = _MAX_BATCH_ROWS
        if batch.num_rows and batch.nbytes / batch.num_rows * rows > _MAX_BATCH_BYTES:
            rows = max(1, int(_MAX_BATCH_BYTES * batch.num_rows / batch.nbytes))
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            message = piece.serialize()
            view = memoryview(message)
            written = 0
            try:
                while written < len(view):
                    written += os.pwrite(self._fd, view[written:], self._end + written)
            except OSError as error:
                raise OutputError(f"kept columns cannot be staged: {error.strerror}") from None
            # The span goes first: a reader finds a row through `_first_rows`.
            self._spans.append((self._end, len(view)))
            self._first_rows.append(self.num_rows)
            self._end += len(view)
            self.num_rows += piece.num_rows

    def take(self, row_indices: np.ndarray) -> pa.Table:
        """The cells of these rows, in this order. `row_indices`: int64, ascending, may repeat."""
        first_rows = np.asarray(self._first_rows, dtype=np.int64)
        numbers = np.searchsorted(first_rows, row_indices, side="right") - 1
        pieces: list[pa.RecordBatch] = []
        start = 0
        while start < len(row_indices):
            number = int(numbers[start])
            stop = int(np.searchsorted(numbers, number, side="right"))
            inside = row_indices[start:stop] - first_rows[number]
            pieces.append(self._read(number).take(pa.array(inside)))
            start = stop
        return pa.Table.from_batches(pieces, schema=self.schema)

    def _read(self, number: int) -> pa.RecordBatch:
        offset, length = self._spans[number]
        data = bytearray()
        while len(data) < length:
            piece = os.pread(self._fd, length - len(data), offset + len(data))
            if not piece:
                raise OutputError("kept columns cannot be read back: the staged file is cut short")
            data += piece
        return pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)), self.schema)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
