"""The input table of a job: Parquet as it lies, or what DuckDB makes of SQL, CSV and JSON lines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import pyarrow as pa

from batchllm.data.duckdb_files import files_table
from batchllm.data.earlier import STAGES_COLUMN, StageCompletions, stages_type, with_stages_column
from batchllm.data.input_files import find_files, table_kind
from batchllm.data.openai_input import CARRIED_COLUMNS, ID_COLUMN, spool_requests
from batchllm.data.parquet_files import ParquetFiles, check_columns, footer_digest, open_files, read_batches
from batchllm.data.schema import carried_fields, carried_type
from batchllm.data.sections import InputSection, JobSections
from batchllm.data.spool import spool_query, spool_text_files
from batchllm.data.templates import template_columns
from batchllm.errors import InputError
from batchllm.models.fingerprint import file_digest


@dataclass(frozen=True, slots=True)
class Input:
    """The rows of a job, in an order that a resume finds again. `columns` are those that the job reads.

    `schema` is the input's own; `carried` are the fields that the output gets (`id`, then the kept columns).
    `fingerprint` says what must be the same on resume. `num_rows` is the number that this run takes (`--limit`).
    `earlier` are the stages whose completions the rows carry already.
    `holds_requests`: the rows are those that `openai_input` makes of a batch file.
    """

    name: str
    schema: pa.Schema
    columns: tuple[str, ...]
    id_column: str | None
    carried: tuple[pa.Field, ...]
    num_rows: int
    fingerprint: dict[str, object]
    table: ParquetFiles
    earlier: tuple[StageCompletions, ...] = ()
    holds_requests: bool = False

    @property
    def total_rows(self) -> int:
        """All rows, also those that a limit leaves for a later run; resume counts these."""
        return self.table.num_rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, a small batch at a time, with `columns` under the types they have. Raises InputError."""
        first_row = 0
        for batch in read_batches(self.table, self.columns, name=self.name):
            if first_row >= self.num_rows:
                return
            piece = batch.slice(0, self.num_rows - first_row)
            if self.earlier:
                piece = with_stages_column(piece, first_row=first_row, earlier=self.earlier)
            yield piece
            first_row += batch.num_rows

    def after(self, earlier: Sequence[StageCompletions]) -> Input:
        """The same rows for a later stage: with a column `stages` of their completions so far."""
        schema = self.schema.append(pa.field(STAGES_COLUMN, stages_type(earlier)))
        return replace(self, schema=schema, earlier=tuple(earlier))


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
    check_columns(table, columns, name=name)
    if table.num_rows == 0:
        raise InputError(f"{name}: the input has no rows")
    carried = carried_fields(section, table.schema)
    _check_carried_types(table, section)
    for stage in job.stage_jobs():
        if stage.prompt.messages is not None:
            _check_messages_type(table, stage.prompt.messages, name=name)
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
    section, names = job.input, list(schema.names)
    wanted: set[str] = set()
    named = {"input.id": section.id}
    named |= {f"input.keep.{index}": column for index, column in enumerate(section.keep)}
    stages = job.stage_jobs()
    if len(stages) > 1 and STAGES_COLUMN in names:
        raise InputError(
            f"the input has a column {STAGES_COLUMN!r}, which in a job with stages is the name of their completions; "
            "rename it with input.sql"
        )
    for number, stage in enumerate(stages):
        at = f"stages.{number}." if len(stages) > 1 else ""
        known = [*names, STAGES_COLUMN] if number else names
        for key, text in (("template", stage.prompt.template), ("system", stage.prompt.system)):
            if text is not None:
                try:
                    wanted |= set(template_columns(text, columns=known)) - ({STAGES_COLUMN} if number else set())
                except ValueError as error:
                    raise InputError(f"{at}prompt.{key}: {error}") from None
        named[f"{at}prompt.messages"] = stage.prompt.messages
        named[f"{at}output.choice"] = stage.output.choice_column
        named |= {f"{at}sampling.{field}": column for field, column in stage.sampling.columns().items()}
    for key, column in named.items():
        if column is not None and column not in names:
            raise InputError(f"{key}: the input has no column {column!r}; its columns: {', '.join(names)}")
    wanted |= {column for column in named.values() if column is not None}
    # A constant prompt reads no column, but its rows must be counted: one column does that.
    return [column for column in names if column in wanted] or names[:1]


def _open_table(job: JobSections, *, spool_folder: Path, name: str) -> tuple[bool, ParquetFiles]:
    section = job.input
    if section.sql is not None:
        spool = spool_query(section.sql, folder=job.folder, spool_folder=spool_folder, name=name)
        return True, open_files([spool], name=name, is_spool=True)
    assert section.path is not None
    files = find_files(section.path)
    if table_kind(files[0]) == "Parquet":
        return False, open_files(files, name=name)
    spool = spool_text_files(files, spool_folder=spool_folder, name=name)
    return True, open_files([spool], name=name, is_spool=True)


def _spool_fingerprint(table: ParquetFiles) -> dict[str, object]:
    """Rows, their content and their order: a query without ORDER BY may answer in another order on resume."""
    connection = duckdb.connect()
    try:
        digest = connection.execute(
            f"SELECT bit_xor(hash(rows, file_row_number)) FROM {files_table('read_parquet', table.files, options='file_row_number = true')} AS rows"
        ).fetchone()
    finally:
        connection.close()
    return {"rows": table.num_rows, "rows and their order (use ORDER BY)": f"{digest[0]:016x}" if digest else ""}


def _files_fingerprint(table: ParquetFiles) -> dict[str, object]:
    """The bytes of the files: a footer, whose statistics are of the least and the greatest values, may be the same for other rows.
    Of a file so large that its bytes are sampled it shows more than they do.
    """
    names = [path.name for path in table.files]
    digests = []
    for path in table.files:
        try:
            digests += [file_digest(path).hex(), footer_digest(path)]
        except OSError as error:
            raise InputError(f"input.path: {path}: cannot be read: {error.strerror}") from None
    content = hashlib.sha256("\n".join([*names, *digests]).encode()).hexdigest()
    return {"rows": table.num_rows, "files": len(names), "content": content}


def _check_carried_types(table: ParquetFiles, section: InputSection) -> None:
    """All files carry the id and kept columns under one type, since the output has one schema."""
    columns = [*((section.id,) if section.id is not None else ()), *section.keep]
    for path, schema in zip(table.files, table.schemas, strict=True):
        for column in columns:
            first, other = carried_type(table.schema.field(column).type), carried_type(schema.field(column).type)
            if first != other:
                raise InputError(
                    f"input.path: {path}: column {column!r} is {other} here and {first} in {table.files[0].name}"
                )


def _check_messages_type(table: ParquetFiles, column: str, *, name: str) -> None:
    """In every file a list of structs with text fields `role` and `content`, in any order and beside other fields."""
    for path, schema in zip(table.files, table.schemas, strict=True):
        type_ = carried_type(schema.field(column).type)
        if not _is_conversation(type_):
            raise InputError(
                f"{name}: {path}: column {column!r} is {type_}; prompt.messages wants a list of structs "
                "with text fields role and content"
            )


def _is_conversation(type_: pa.DataType) -> bool:
    if not (pa.types.is_list(type_) or pa.types.is_large_list(type_)) or not pa.types.is_struct(type_.value_type):
        return False
    fields = {field.name: field.type for field in type_.value_type}
    return all(_is_text(fields.get(key)) for key in ("role", "content"))


def _is_text(type_: pa.DataType | None) -> bool:
    return type_ is not None and (
        pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_binary(type_)
    )
