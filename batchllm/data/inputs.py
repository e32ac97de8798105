"""The input table of a job: Parquet as it lies, or what DuckDB makes of SQL, CSV and JSON lines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm.data.openai_input import CARRIED_COLUMNS, ID_COLUMN, spool_requests
from batchllm.data.parquet_files import ParquetFiles, check_columns, find_files, first_line, open_files, read_batches
from batchllm.data.schema import carried_fields, carried_type
from batchllm.data.sections import InputSection, JobSections
from batchllm.data.templates import template_columns
from batchllm.errors import InputError, JobError

_SPOOL_BYTES = 16 << 20
_DUCKDB_MEMORY = "1GB"


@dataclass(frozen=True, slots=True)
class Input:
    """The rows of a job, in an order that a resume finds again. `columns` are those that the job reads.

    `schema` is the input's own; `carried` are the fields that the output gets (`id`, then the kept columns).
    `fingerprint` says what must be the same on resume. `holds_requests`: the rows are those of `openai_input`. `num_rows` is the number that this run takes (`--limit`).
    """

    name: str
    schema: pa.Schema
    columns: tuple[str, ...]
    id_column: str | None
    carried: tuple[pa.Field, ...]
    num_rows: int
    fingerprint: dict[str, object]
    table: ParquetFiles
    holds_requests: bool = False

    @property
    def total_rows(self) -> int:
        """All rows, also those that a limit leaves for a later run; resume counts these."""
        return self.table.num_rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, a small batch at a time, with `columns` under the types they have. Raises InputError."""
        left = self.num_rows
        for batch in read_batches(self.table, self.columns, name=self.name):
            if left <= 0:
                return
            yield batch.slice(0, left)
            left -= batch.num_rows


def open_input(job: JobSections, *, spool_folder: Path, limit: int | None = None) -> Input:
    """Opens the input and checks all that can be checked without the model. `limit` takes the first rows only.

    The rows of SQL, CSV and JSON lines are spooled to `spool_folder` once, so that they are counted and stay the same
    while the job runs. Raises InputError (or JobError for a bad query), one line.
    """
    section = job.input
    if section.openai_batch is not None:
        return _open_requests(Path(section.openai_batch), spool_folder=spool_folder, limit=limit)
    name = "input.sql" if section.sql is not None else "input.path"
    is_spooled, table = _open_table(job, spool_folder=spool_folder, name=name)
    columns = needed_columns(job, schema=table.schema)
    if section.sql is None and not is_spooled:
        check_columns(table, columns, name=name)
    if table.num_rows == 0:
        raise InputError(f"{name}: the input has no rows")
    carried = carried_fields(section, table.schema)
    if not is_spooled:
        _check_carried_types(table, section)
    if job.prompt.messages is not None:
        _check_messages_type(job.prompt.messages, table.schema.field(job.prompt.messages).type, name=name)
    return Input(
        name=name,
        schema=table.schema,
        columns=tuple(columns),
        id_column=section.id,
        carried=tuple(carried),
        num_rows=table.num_rows if limit is None else min(limit, table.num_rows),
        fingerprint=_spool_fingerprint(table) if is_spooled else _files_fingerprint(table),
        table=table,
    )


def _open_requests(path: Path, *, spool_folder: Path, limit: int | None) -> Input:
    name = "input.openai_batch"
    table = spool_requests(path, target=spool_folder / "input.parquet", name=name)
    if table.num_rows == 0:
        raise InputError(f"{name}: {path}: the file has no requests")
    return Input(
        name=name,
        schema=table.schema,
        columns=tuple(table.schema.names),
        id_column=ID_COLUMN,
        carried=(pa.field("id", pa.string()), *(table.schema.field(column) for column in CARRIED_COLUMNS)),
        num_rows=table.num_rows if limit is None else min(limit, table.num_rows),
        fingerprint=_spool_fingerprint(table),
        table=table,
        holds_requests=True,
    )


def needed_columns(job: JobSections, *, schema: pa.Schema) -> list[str]:
    """The columns that the job reads, in input order. Raises InputError naming one that is missing."""
    section, prompt, names = job.input, job.prompt, list(schema.names)
    wanted: set[str] = set()
    for key, text in (("template", prompt.template), ("system", prompt.system)):
        if text is not None:
            try:
                wanted |= set(template_columns(text, columns=names))
            except ValueError as error:
                raise InputError(f"prompt.{key}: {error}") from None
    named = {"prompt.messages": prompt.messages, "input.id": section.id}
    named |= {f"input.keep.{index}": column for index, column in enumerate(section.keep)}
    named |= {f"sampling.{field}": column for field, column in job.sampling.columns().items()}
    for key, column in named.items():
        if column is not None and column not in names:
            raise InputError(f"{key}: the input has no column {column!r}; its columns: {', '.join(names)}")
    wanted |= {column for column in named.values() if column is not None}
    # A constant prompt reads no column, but its rows must be counted: one column does that.
    return [column for column in names if column in wanted] or names[:1]


def _open_table(job: JobSections, *, spool_folder: Path, name: str) -> tuple[bool, ParquetFiles]:
    section = job.input
    if section.sql is not None:
        return True, _spool(section.sql, folder=job.folder, spool_folder=spool_folder, name=name)
    assert section.path is not None
    files = find_files(section.path)
    reader = _text_reader(files)
    if reader is None:
        return False, open_files(files, name=name)
    return True, _spool(reader, folder=job.folder, spool_folder=spool_folder, name=name)


def _text_reader(files: tuple[Path, ...]) -> str | None:
    """The query that reads CSV or JSON lines; None for Parquet. Text stays text: no guessing of numbers and dates."""
    listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in files)
    name = files[0].name.lower().removesuffix(".gz").removesuffix(".zst")
    if name.endswith((".csv", ".tsv")):
        return f"SELECT * FROM read_csv([{listed}], header = true, all_varchar = true)"
    if name.endswith((".jsonl", ".ndjson")):
        options = "format = 'newline_delimited', records = true, dateformat = 'never', timestampformat = 'never'"
        return f"SELECT * FROM read_json([{listed}], {options})"
    return None


def _spool(sql: str, *, folder: Path, spool_folder: Path, name: str) -> ParquetFiles:
    """Runs a query and writes its rows to one Parquet file, streaming. Raises JobError for a query that is refused."""
    path = spool_folder / "input.parquet"
    connection = duckdb.connect()
    try:
        connection.execute(f"SET memory_limit = '{_DUCKDB_MEMORY}'")
        connection.execute("SET temp_directory = ?", [str(spool_folder / "duckdb")])
        connection.execute("SET file_search_path = ?", [str(folder)])
        statements = connection.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise JobError(f"{name}: needs one SELECT statement")
        reader = connection.sql(statements[0].query).to_arrow_reader(1024)
        with pq.ParquetWriter(path, reader.schema, compression="zstd", compression_level=1) as writer:
            batches: list[pa.RecordBatch] = []
            for batch in reader:
                batches.append(batch)
                if sum(waiting.nbytes for waiting in batches) >= _SPOOL_BYTES:
                    writer.write_table(pa.Table.from_batches(batches))
                    batches = []
            if batches:
                writer.write_table(pa.Table.from_batches(batches))
    except duckdb.Error as error:
        raise InputError(f"{name}: {first_line(error)}") from None
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{name}: its rows cannot be staged: {first_line(error)}") from None
    finally:
        connection.close()
    return open_files([path], name=name)


def _spool_fingerprint(table: ParquetFiles) -> dict[str, object]:
    """Rows, their content and their order: a query without ORDER BY may answer in another order on resume."""
    connection = duckdb.connect()
    try:
        digest = connection.execute(
            "SELECT bit_xor(hash(rows, file_row_number)) FROM read_parquet(?, file_row_number = true) AS rows",
            [str(table.files[0])],
        ).fetchone()
    finally:
        connection.close()
    return {"rows": table.num_rows, "rows and their order (use ORDER BY)": f"{digest[0]:016x}" if digest else ""}


def _files_fingerprint(table: ParquetFiles) -> dict[str, object]:
    names = [path.name for path in table.files]
    content = hashlib.sha256("\n".join([*names, *table.footers]).encode()).hexdigest()
    return {"rows": table.num_rows, "files": len(names), "content": content}


def _check_carried_types(table: ParquetFiles, section: InputSection) -> None:
    """All files carry the id and kept columns under one type, since the output has one schema."""
    columns = [*((section.id,) if section.id is not None else ()), *section.keep]
    for path in table.files[1:] if columns else ():
        schema = pq.read_schema(path)
        for column in columns:
            first, other = carried_type(table.schema.field(column).type), carried_type(schema.field(column).type)
            if first != other:
                raise InputError(
                    f"input.path: {path}: column {column!r} is {other} here and {first} in {table.files[0].name}"
                )


def _check_messages_type(column: str, type_: pa.DataType, *, name: str) -> None:
    """A list of structs with text fields `role` and `content`, in any order and beside other fields."""
    type_ = carried_type(type_)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        message = type_.value_type
        if pa.types.is_struct(message):
            fields = {field.name: field.type for field in message}
            if all(_is_text(fields.get(key)) for key in ("role", "content")):
                return
    raise InputError(
        f"{name}: column {column!r} is {type_}; prompt.messages wants a list of structs "
        "with text fields role and content"
    )


def _is_text(type_: pa.DataType | None) -> bool:
    return type_ is not None and (
        pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_binary(type_)
    )
