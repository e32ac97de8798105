"""Parquet files as one table: their columns and rows, and batches in bounded memory.

Metadata of single column chunks is never asked for: for some encrypted files the reader ends the process there.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm.errors import InputError

# Cells can be long: this many rows of a megabyte each still fit in memory.
BATCH_ROWS = 128
_READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ParquetFiles:
    """Files in the order of their rows, and of each: its number of rows and its schema."""

    files: tuple[Path, ...]
    file_rows: tuple[int, ...]
    schemas: tuple[pa.Schema, ...]

    @property
    def schema(self) -> pa.Schema:
        """The first file's."""
        return self.schemas[0]

    @property
    def num_rows(self) -> int:
        return sum(self.file_rows)


def open_files(files: Sequence[Path], *, name: str, is_spool: bool = False) -> ParquetFiles:
    """Reads the footers. `name` stands for the input in errors. Raises InputError naming the file, unless it `is_spool`, made here."""
    schemas: list[pa.Schema] = []
    file_rows: list[int] = []
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                file_schema, num_rows = file.schema_arrow, file.metadata.num_rows
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{name}: {path}: cannot be read as Parquet: {first_line(error)}{_kinds(path)}") from None
        schemas.append(file_schema)
        file_rows.append(num_rows)
        twice = next((column for column, count in Counter(file_schema.names).items() if count > 1), None)
        if twice is not None:
            raise InputError(f"{name}: {'' if is_spool else f'{path}: '}has two columns named {twice!r}")
    return ParquetFiles(files=tuple(files), file_rows=tuple(file_rows), schemas=tuple(schemas))


def _kinds(path: Path) -> str:
    """What else could be read, for a file whose name does not say Parquet."""
    if path.suffix.lower() in (".parquet", ".pq"):
        return ""
    return "; names that end in .csv, .tsv, .jsonl and .ndjson (also with .gz or .zst) are read as such, all others as Parquet"


def footer_digest(path: Path) -> str:
    """Of the footer: sizes, offsets and statistics of all data. Raises OSError."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - 8 - length))
        return hashlib.sha256(file.read(length)).hexdigest()


def check_columns(table: ParquetFiles, columns: Sequence[str], *, name: str) -> None:
    """Every file has the columns. Raises InputError naming file and column."""
    for path, schema in zip(table.files, table.schemas, strict=True):
        for column in columns:
            if column not in schema.names:
                raise InputError(f"{name}: {path}: has no column {column!r}; its columns: {', '.join(schema.names)}")


def read_batches(table: ParquetFiles, columns: Sequence[str], *, name: str) -> Iterator[pa.RecordBatch]:
    """The rows in order, `BATCH_ROWS` at most at a time, with just these columns. Raises InputError naming the file."""
    for path, expected_rows in zip(table.files, table.file_rows, strict=True):
        num_rows = 0
        try:
            with pq.ParquetFile(path, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=list(columns), use_threads=False):
                    num_rows += batch.num_rows
                    yield batch.select(list(columns))
        except (OSError, pa.ArrowException) as error:
            place = _failing_column(path, columns)
            raise InputError(f"{name}: {path}: {place}cannot be read: {first_line(error)}") from None
        if num_rows != expected_rows:
            raise InputError(f"{name}: {path}: gave {num_rows} rows where its footer says {expected_rows}")


def _failing_column(path: Path, columns: Sequence[str]) -> str:
    """Names the first column that cannot be read by itself, such as an encrypted one; empty where each can."""
    for column in columns:
        try:
            with pq.ParquetFile(path, buffer_size=_READ_BUFFER_BYTES) as file:
                for _ in file.iter_batches(batch_size=BATCH_ROWS, columns=[column], use_threads=False):
                    pass
        except (OSError, pa.ArrowException):
            return f"column {column!r} "
    return ""


def first_line(error: Exception) -> str:
    """The first line of a library's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
