"""Arrow tables on a terminal: aligned text, or JSON rows."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa

_MAX_WIDTH = 80


def values_of(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Python's values. Python has no year 10000 and no nanoseconds: a column with such a moment is text, as DuckDB writes it."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        import duckdb

        with duckdb.connect() as connection:
            texts = connection.from_arrow(pa.table({"value": column})).project("CAST(value AS VARCHAR) AS value")
            return texts.to_arrow_table()["value"].to_pylist()


def as_json_rows(table: pa.Table) -> str:
    """A JSON list with one object a row; what JSON has no form for becomes text, and a number that is none becomes null."""
    columns = [values_of(column) for column in table.columns]
    rows = [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
    try:
        return json.dumps(rows, default=str, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(rows), default=str, ensure_ascii=False, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, (list, tuple)):  # a map is a list of tuples
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text_table(table: pa.Table) -> str:
    """Columns aligned, numbers to the right, long cells cut; the number of rows below."""
    names = [_cell(name) for name in table.schema.names]
    cells = [[_cell(value) for value in values_of(column)] for column in table.columns]
    widths = [max([len(name), *map(len, column)]) for name, column in zip(names, cells, strict=True)]
    numeric = [_is_number(field.type) for field in table.schema]

    def line(values: list[str]) -> str:
        padded = [
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rows = [list(row) for row in zip(*cells, strict=True)]
    text = [line(list(names)), line(["-" * width for width in widths]), *map(line, rows)]
    return "\n".join([*text, f"({table.num_rows} row{'' if table.num_rows == 1 else 's'})"])


def _is_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_)


def _cell(value: object) -> str:
    text = "NULL" if value is None else str(value)
    text = text.replace("\r", " ").replace("\n", "⏎")
    # A terminal would obey control characters that a model or a file put into a cell.
    text = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return text if len(text) <= _MAX_WIDTH else text[: _MAX_WIDTH - 1] + "…"
