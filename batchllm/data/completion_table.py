"""Completions as an Arrow table: one output row each, under the explicit schema, with the cells of their input rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from batchllm.prompt import Completion


class Cells(Protocol):
    """Cells that a row carries to the output, as a table with a column for each."""

    def take(self, row_indices: np.ndarray) -> pa.Table: ...


def completion_table(
    rows: Sequence[Completion], *, schema: pa.Schema, kept: Cells, run_id: str, model: str
) -> pa.Table:
    """The rows as they are written, in the order given, which is ascending in `row_index`."""
    row_index = np.fromiter((row.row_index for row in rows), dtype=np.int64, count=len(rows))
    cells = kept.take(row_index)
    columns: dict[str, Any] = {name: cells.column(name) for name in cells.schema.names}
    columns |= {
        "row_index": row_index,
        "sample_index": [row.sample_index for row in rows],
        "completion": [row.text if row.error is None else None for row in rows],
        "finish_reason": ["error" if row.error is not None else row.finish_reason for row in rows],
        "stop_reason": [row.stop_reason for row in rows],
        "error": [None if row.error is None else _writable(row.error) for row in rows],
        "completion_tokens": [len(row.token_ids) for row in rows],
        "run_id": [run_id] * len(rows),
        "model": [model] * len(rows),
        "token_ids": [row.token_ids if row.error is None else None for row in rows],
        "logprobs": [_logprobs(row) for row in rows] if "logprobs" in schema.names else None,
    }
    for name in ("prompt_tokens", "cached_tokens", "restored_tokens", "preemptions"):
        columns[name] = [getattr(row, name) for row in rows]
    for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s"):
        columns[name] = [getattr(row, name) for row in rows]
    arrays = []
    for field in schema:
        values = columns[field.name]
        arrays.append(values if isinstance(values, pa.ChunkedArray) else pa.array(values, type=field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _writable(text: str) -> str:
    """Error texts may quote names that are no UTF-8; the column must be."""
    return text.encode("utf-8", "replace").decode()


def _logprobs(completion: Completion) -> list[dict[str, object]] | None:
    if completion.logprobs is None or completion.error is not None:
        return None
    return [
        {
            "token_id": token_id,
            "logprob": _finite(logprob),
            "top": [{"token_id": other, "logprob": _finite(value)} for other, value in top],
        }
        for token_id, logprob, top in completion.logprobs
    ]


def _finite(value: float) -> float | None:
    """A filtered-out alternative has probability 0: NULL, since -inf breaks JSON and averages."""
    return value if math.isfinite(value) else None
