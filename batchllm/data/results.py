"""Reading a run's output with DuckDB: the views `completions`, `errors`, `runs`, `steps` and `tiers`, in plain SQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa

from batchllm.data.duckdb_files import files_table
from batchllm.data.parts import visible_parts
from batchllm.data.run_views import empty_select, run_view_statements
from batchllm.data.schema import completion_schema
from batchllm.errors import FolderError, JobError


def say_nothing(line: str) -> None:
    """Tells nobody."""


def view_statements(folder: Path | str, *, warn: Callable[[str], None] = say_nothing) -> list[str]:
    """The SQL that defines the views over the parts and run folders that are there now; it runs in any DuckDB.

    What a run left beside the parts is left out where it is damaged, and `warn` is told. With no part yet, `completions` is empty and has the columns that every job writes.
    """
    parts = visible_parts(Path(folder))
    if parts:
        source = f"SELECT * FROM {files_table('read_parquet', parts)}"
    else:
        source = empty_select(_empty_columns())
    return [
        f"CREATE OR REPLACE VIEW completions AS {source} ORDER BY row_index, sample_index",
        "CREATE OR REPLACE VIEW errors AS SELECT * FROM completions WHERE error IS NOT NULL",
        *run_view_statements(Path(folder), warn=warn),
    ]


def connect(folder: Path | str, *, warn: Callable[[str], None] = say_nothing) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB with the views. Raises FolderError when a part cannot be read."""
    connection = duckdb.connect()
    try:
        for statement in view_statements(folder, warn=warn):
            connection.execute(statement)
    except duckdb.Error as error:
        connection.close()
        raise FolderError(f"{folder}: the results cannot be read: {_first_line(error)}") from None
    return connection


def query(sql: str, folder: Path | str, *, warn: Callable[[str], None] = say_nothing) -> pa.Table:
    """Runs one statement over the views. Raises JobError, one line, for SQL that DuckDB refuses or that names two columns alike."""
    try:
        sql.encode()
    except UnicodeEncodeError:
        raise JobError("query: the statement is not Unicode text; write it as UTF-8") from None
    connection = connect(folder, warn=warn)
    try:
        statements = connection.extract_statements(sql)
        if len(statements) != 1:
            raise JobError(f"one SQL statement is wanted, not {len(statements)}")
        relation = connection.sql(statements[0])
        if relation is None:
            raise JobError("query: the statement gives no rows; write a SELECT")
        twice = next((name for name, count in Counter(relation.columns).items() if count > 1), None)
        if twice is not None:
            # JSON and Parquet have one column of a name.
            raise JobError(f"query: two columns are called {twice!r}; name one of them otherwise with AS")
        return relation.to_arrow_table()
    except duckdb.Error as error:
        raise JobError(f"query: {_first_line(error)}") from None
    finally:
        connection.close()


def _empty_columns() -> dict[str, str]:
    carried = [pa.field("id", pa.string())]
    schema = completion_schema(carried, with_token_ids=False, with_logprobs=False)
    names = {pa.string(): "VARCHAR", pa.int64(): "BIGINT", pa.int32(): "INTEGER", pa.float64(): "DOUBLE"}
    return {field.name: names[field.type] for field in schema}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
