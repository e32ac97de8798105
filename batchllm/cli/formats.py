"""Query results as a table, CSV, JSON or Parquet, to standard output or to a file. Imports nothing heavy until it writes."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from batchllm.cli.saying import put
from batchllm.errors import write_error

if TYPE_CHECKING:
    import pyarrow as pa

TableFormat = Literal["table", "csv", "json", "parquet"]


def write_table(table: pa.Table, *, table_format: TableFormat, output_file: Path | None) -> None:
    """Writes rows to `output_file`, which appears whole, or to standard output. Raises FolderError or OutputError."""
    content = _parquet(table) if table_format == "parquet" else _text(table, table_format).encode()
    if output_file is None:
        put(content, newline=False)
        return
    temporary = output_file.with_name(f".{output_file.name}.tmp")
    try:
        temporary.write_bytes(content)
        os.rename(temporary, output_file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise write_error(f"{output_file}: cannot be written", error) from None


def _text(table: pa.Table, table_format: TableFormat) -> str:
    from batchllm.cli.tables import as_json_rows, as_text_table

    if table_format == "csv":
        return _csv(table)
    return (as_json_rows(table) if table_format == "json" else as_text_table(table)) + "\n"


def _csv(table: pa.Table) -> str:
    """NULL is an empty field; lists and structs are JSON."""
    from batchllm.cli.tables import values_of

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.schema.names)
    for batch in table.to_batches(max_chunksize=10_000):
        columns = [values_of(column) for column in batch.columns]
        for row in zip(*columns, strict=True):
            writer.writerow(
                json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else value
                for value in row
            )
    return text.getvalue()


def _parquet(table: pa.Table) -> bytes:
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
