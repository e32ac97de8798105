"""An OpenAI batch file as the input table of a job: one row for each line that is not blank."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm.bounded_files import read_lines
from batchllm.data.openai_requests import Request, parse_line, refuse_repeated
from batchllm.data.parquet_files import ParquetFiles, first_line, open_files
from batchllm.errors import InputError, OutputError

ID_COLUMN = "custom_id"
CARRIED_COLUMNS = ("request_line", "request_url", "request_model")
REQUEST_COLUMN = "request"
SAMPLING_COLUMN = "request_sampling"
ERROR_COLUMN = "request_error"
# Messages and sampling are kept as the JSON that they are, so that no line decides the type of another.
SCHEMA = pa.schema(
    [
        (ID_COLUMN, pa.string()),
        ("request_line", pa.int64()),
        ("request_url", pa.string()),
        ("request_model", pa.string()),
        (REQUEST_COLUMN, pa.string()),
        (SAMPLING_COLUMN, pa.string()),
        (ERROR_COLUMN, pa.string()),
    ]
)
_BOM = b"\xef\xbb\xbf"
_GROUP_BYTES = 16 << 20


def spool_requests(path: Path, *, target: Path, name: str) -> ParquetFiles:
    """Writes the requests of a batch file to the Parquet file `target`, streaming, and opens it.

    A line that cannot be run is a row with an error. Raises InputError for a file that cannot be read.
    """
    try:
        with open(path, "rb") as file, pq.ParquetWriter(target, SCHEMA, compression="zstd") as writer:
            rows: list[dict[str, object]] = []
            size = 0
            for request in read_requests(read_lines(file)):
                rows.append(_row(request))
                size += 256 + sum(len(cell) for cell in rows[-1].values() if isinstance(cell, str))
                if size >= _GROUP_BYTES:
                    writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
                    rows, size = [], 0
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OutputError(f"{name}: its requests cannot be staged: {error.strerror}") from None
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{name}: {path}: cannot be read: {reason}") from None
    return open_files([target], name=name)


def read_requests(lines: Iterator[bytes]) -> Iterator[Request]:
    """The requests of a file's lines, blank ones left out; a `custom_id` counts where it stands first."""
    first_lines: dict[str, int] = {}
    for number, data in enumerate(lines, start=1):
        data = data.removeprefix(_BOM) if number == 1 else data
        if not data.strip():
            continue
        request = parse_line(data, line=number)
        if request.custom_id is not None:
            first = first_lines.setdefault(request.custom_id, number)
            if first != number:
                request = refuse_repeated(request, first_line=first)
        yield request


def _row(request: Request) -> dict[str, object]:
    content = {"messages": request.messages} if request.messages is not None else {"prompt": request.prompt}
    error = request.error
    return {
        ID_COLUMN: request.custom_id,
        "request_line": request.line,
        "request_url": request.url,
        "request_model": request.model,
        REQUEST_COLUMN: None if error is not None else json.dumps(content),
        SAMPLING_COLUMN: None if error is not None else json.dumps(dict(request.sampling or {}), sort_keys=True),
        ERROR_COLUMN: None if error is None else error.encode("utf-8", "replace").decode(),
    }
