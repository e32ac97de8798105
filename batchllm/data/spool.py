"""Rows that DuckDB makes (SQL, CSV, JSON lines), written once to a Parquet file so that they stay as they are."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm.data.duckdb_files import file_literal, files_table
from batchllm.data.input_files import table_kind
from batchllm.data.json_lines import with_line
from batchllm.data.parquet_files import first_line
from batchllm.errors import InputError, JobError, OutputError

# Batches are gathered to row groups of about this size.
_ROW_GROUP_BYTES = 16 << 20
_MEMORY = "1GB"
_CSV = "header = true, all_varchar = true"
_JSON = (
    "format = 'newline_delimited', records = true, sample_size = -1, dateformat = 'never', timestampformat = 'never'"
)


def spool_query(sql: str, *, folder: Path, spool_folder: Path, name: str) -> Path:
    """Runs a query, which reads relative files from `folder`; returns the file of its rows, in their order.

    Raises JobError for what is no single SELECT, InputError when the query fails, OutputError where its rows take more than there is; `name` stands for it there.
    """
    with _connection(spool_folder, name=name) as connection:
        connection.execute("SET file_search_path = ?", [str(folder)])
        statements = connection.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise JobError(f"{name}: needs one SELECT statement")
        return _write(connection.sql(statements[0].query), spool_folder)


def spool_text_files(files: tuple[Path, ...], *, spool_folder: Path, name: str) -> Path:
    """Reads CSV or JSON lines; returns the file of their rows. Raises InputError.

    Text stays text: no cell is guessed to be a number or a date that prints otherwise than it was written.
    """
    with _connection(spool_folder, name=name, files=files) as connection:
        if table_kind(files[0]) == "CSV":
            for path in files:
                _check_csv(connection, path, name=name)
            return _write(connection.sql(f"SELECT * FROM {files_table('read_csv', files, options=_CSV)}"), spool_folder)
        query = f"SELECT * FROM {files_table('read_json', files, options=_JSON)}"
        relation = connection.sql(query)
        types = dict(zip(relation.columns, map(str, relation.types), strict=True))
        # A field that holds text here and numbers there is JSON: its text without the quotes is meant.
        mixed = [_identifier(column) for column, type_ in types.items() if type_ == "JSON"]
        if mixed:
            plain = ", ".join(f"json_extract_string({column}, '$') AS {column}" for column in mixed)
            relation = connection.sql(f"SELECT * REPLACE ({plain}) FROM ({query})")
        return _write(relation, spool_folder)


@contextmanager
def _connection(spool_folder: Path, *, name: str, files: tuple[Path, ...] = ()) -> Iterator[duckdb.DuckDBPyConnection]:
    connection = duckdb.connect()
    try:
        connection.execute(f"SET memory_limit = '{_MEMORY}'")
        connection.execute("SET temp_directory = ?", [str(spool_folder / "duckdb")])
        yield connection
    except (duckdb.Error, OSError, pa.ArrowException) as error:
        raise _failure(error, name=name, files=files) from None
    finally:
        connection.close()


def _failure(error: Exception, *, name: str, files: tuple[Path, ...]) -> InputError | OutputError:
    """Rows that are wrong, or a disk or memory that is full. DuckDB's errors in the middle of a stream come as Arrow's."""
    full = (os.strerror(errno.ENOSPC), "Out of Memory Error")
    if getattr(error, "errno", None) is not None or any(text in str(error) for text in full):
        return OutputError(f"{name}: its rows cannot be staged: {first_line(error)}")
    what = "its rows cannot be staged: " if isinstance(error, pa.ArrowNotImplementedError) else ""
    return InputError(f"{name}: {what}{with_line(_reason(error), files=files)}")


def _reason(error: Exception) -> str:
    """One line of DuckDB's message; of a CSV file's also which file and what is wrong there."""
    text = first_line(error)
    file = re.search(r"^  file = (.+)$", str(error), re.MULTILINE)
    if file is None or file[1] in text:
        return text
    sentences = [line for line in str(error).splitlines()[1:] if line.endswith((".", "Found"))]
    return ": ".join([file[1], text, *sentences[:1]])


def _check_csv(connection: duckdb.DuckDBPyConnection, path: Path, *, name: str) -> None:
    """Raises InputError for two columns of one name, and for a quote that is not closed: DuckDB takes both files, as other ones."""
    ((*characters, skipped_rows),) = connection.execute(
        f"SELECT Delimiter, Quote, Escape, Comment, SkipRows FROM sniff_csv({file_literal(path)}, {_CSV})"
    ).fetchall()
    delimiter, quote, escape, comment = ("" if text == "(empty)" else text for text in characters)
    dialect = _Dialect(delimiter, quote, escape, comment, skipped_rows)
    rows = connection.sql(f"SELECT * FROM {files_table('read_csv', [path], options=_CSV)}")
    if any(column.rpartition("_")[0] in rows.columns for column in rows.columns):
        _check_names(connection, path, dialect=dialect, name=name)
    if dialect.quote != '"':  # else DuckDB finds an open one itself
        _check_quotes(connection, rows, what=f"{name}: {path}")


class _Dialect(NamedTuple):
    delimiter: str
    quote: str
    escape: str
    comment: str
    skipped_rows: int


def _check_names(connection: duckdb.DuckDBPyConnection, path: Path, *, dialect: _Dialect, name: str) -> None:
    """Raises InputError for two columns of one name `x`; DuckDB calls the second one `x_1`, as it might be called in the file."""
    options = "header = false, all_varchar = true, delim = ?, quote = ?, escape = ?, comment = ?, skip = ?"
    head = f"SELECT * FROM {files_table('read_csv', [path], options=options)} LIMIT 1"
    heads = connection.execute(head, [*dialect]).fetchall()
    names = Counter(cell.strip() for cell in (heads[0] if heads else ()) if cell is not None)
    twice = next((column for column, count in names.items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{name}: {path}: has two columns named {twice!r}")


def _check_quotes(connection: duckdb.DuckDBPyConnection, rows: duckdb.DuckDBPyRelation, *, what: str) -> None:
    """Raises InputError for a cell that opens a quote and does not close it: DuckDB would take the file for one without quotes."""
    found = 1 if any(_is_open(column) for column in rows.columns) else None
    if found is None:
        cells = [_identifier(column) for column in rows.columns]
        is_open = " OR ".join(
            f"(starts_with({cell}, '\"') AND (length({cell}) - length(replace({cell}, '\"', ''))) % 2 = 1)"
            for cell in cells
        )
        numbered = f'SELECT *, row_number() OVER () + 1 AS "line of the file" FROM ({rows.sql_query()})'
        lines = connection.execute(f'SELECT min("line of the file") FROM ({numbered}) WHERE {is_open}').fetchall()
        found = lines[0][0]
    if found is not None:
        raise InputError(
            f"{what}, line {found}: a quote is opened and not closed; "
            "a cell that begins with a quote stands in quotes, with those inside it doubled"
        )


def _is_open(cell: str) -> bool:
    return cell.startswith('"') and cell.count('"') % 2 == 1


def _write(relation: duckdb.DuckDBPyRelation, spool_folder: Path) -> Path:
    return spool_batches(relation.to_arrow_reader(1024), spool_folder=spool_folder)


def spool_batches(reader: pa.RecordBatchReader, *, spool_folder: Path) -> Path:
    """Writes a stream of rows to a file of that folder, in bounded memory, and returns the file. Raises OSError, ArrowException."""
    path = spool_folder / "input.parquet"
    for field in reader.schema:
        _check_type(field)
    with pq.ParquetWriter(path, reader.schema, compression="zstd", compression_level=1) as writer:
        batches: list[pa.RecordBatch] = []
        waiting_bytes = 0
        for batch in reader:
            batches.append(batch)
            waiting_bytes += batch.nbytes
            if waiting_bytes >= _ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(batches))
                batches, waiting_bytes = [], 0
        if batches:
            writer.write_table(pa.Table.from_batches(batches))
    return path


def _check_type(field: pa.Field) -> None:
    """Raises ArrowNotImplementedError that names a column of a type that Parquet does not have."""
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
    except pa.ArrowNotImplementedError:
        raise pa.ArrowNotImplementedError(
            f"column {field.name!r} has the type {field.type}, which Parquet does not have; make it text in the query, as in "
            f'CAST("{field.name}" AS VARCHAR)'
        ) from None


def _identifier(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'
