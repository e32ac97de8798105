"""Completions of earlier stages: kept on disk until their rows are done, so that memory holds 16 bytes of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchllm.data.kept import KeptRows
from batchllm.errors import OutputError

STAGES_COLUMN = "stages"
"""What templates call the completions of earlier stages: `{{ stages.draft }}`."""

_TOKEN = np.dtype("<i4")


def completion_column(stage: str) -> str:
    """The output column of an earlier stage's completion."""
    return f"completion_{stage}"


class StageCompletions:
    """One stage's completions by row. Owns one file; added by one thread, rows that were added can be read by another."""

    def __init__(self, folder: Path, *, stage: str, num_rows: int) -> None:
        """Creates the file. Raises OutputError."""
        self.stage = stage
        self.is_done = np.zeros(num_rows, dtype=bool)
        self._offset = np.zeros(num_rows, dtype=np.int64)
        self._text_bytes = np.zeros(num_rows, dtype=np.int32)
        self._num_tokens = np.zeros(num_rows, dtype=np.int32)
        self._end = 0
        try:
            path = folder / f"completions-{stage}"
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OutputError(f"{folder}: completions cannot be staged: {error.strerror}") from None

    def add(self, row_index: int, *, text: str, token_ids: Sequence[int]) -> None:
        """Takes a row's completion. `token_ids`: the tokens whose bytes are the text, where such are known. Raises OutputError."""
        data = text.encode()
        record = data + np.asarray(token_ids, dtype=_TOKEN).tobytes()
        try:
            written = 0
            while written < len(record):
                written += os.pwrite(self._fd, record[written:], self._end + written)
        except OSError as error:
            raise OutputError(f"completions cannot be staged: {error.strerror}") from None
        self._offset[row_index] = self._end
        self._text_bytes[row_index] = len(data)
        self._num_tokens[row_index] = len(token_ids)
        self._end += len(record)
        self.is_done[row_index] = True

    def text(self, row_index: int) -> str | None:
        """The row's completion; None where the stage gave none."""
        if not self.is_done[row_index]:
            return None
        return self._read(int(self._offset[row_index]), int(self._text_bytes[row_index])).decode()

    def token_ids(self, row_index: int) -> np.ndarray:
        """int32 `[num_tokens]`: the tokens that make up the text; empty where they are not known."""
        start = int(self._offset[row_index]) + int(self._text_bytes[row_index])
        return np.frombuffer(self._read(start, int(self._num_tokens[row_index]) * _TOKEN.itemsize), dtype=_TOKEN)

    def _read(self, offset: int, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = os.pread(self._fd, length - len(data), offset + len(data))
            if not piece:
                raise OutputError("completions cannot be read back: the staged file is cut short")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def with_stages_column(batch: pa.RecordBatch, *, first_row: int, earlier: Sequence[StageCompletions]) -> pa.RecordBatch:
    """The rows with a struct column `stages`, the completions so far by stage."""
    rows = range(first_row, first_row + batch.num_rows)
    texts = [pa.array([stage.text(row) for row in rows], type=pa.string()) for stage in earlier]
    column = pa.StructArray.from_arrays(texts, fields=list(stages_type(earlier)))
    return batch.append_column(STAGES_COLUMN, column)


def stages_type(earlier: Sequence[StageCompletions]) -> pa.DataType:
    """The type of the column `stages`."""
    return pa.struct([pa.field(stage.stage, pa.string()) for stage in earlier])


class CarriedCells:
    """What an output row takes from its input row and from its earlier stages, by row."""

    def __init__(self, kept: KeptRows, earlier: Sequence[StageCompletions]) -> None:
        self._kept = kept
        self._earlier = earlier

    def take(self, row_indices: np.ndarray) -> pa.Table:
        """The cells of these rows, in this order. `row_indices`: int64, ascending, may repeat."""
        table = self._kept.take(row_indices)
        for stage in self._earlier:
            texts = pa.array([stage.text(row) for row in row_indices.tolist()], type=pa.string())
            table = table.append_column(completion_column(stage.stage), texts)
        return table
