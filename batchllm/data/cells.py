"""Cells of a batch as Python values, with what is wrong with each named: a bad cell never stops a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from batchllm.data.schema import carried_type


class BadCell(Exception):
    """What is wrong with one cell, in words that name its column."""


def plain_column(array: pa.Array) -> pa.Array:
    """The column without dictionaries, views and extension types."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    wanted = carried_type(array.type)
    return array if wanted == array.type else array.cast(wanted)


def python_cells(array: pa.Array, *, column: str) -> list[Any]:
    """One Python value per row. Binary cells are text in UTF-8; a cell that cannot be read is a `BadCell`."""
    array = plain_column(array)
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return [_decoded(cell, column=column) for cell in array.to_pylist()]
    try:
        return _checked(array.to_pylist(), column=column)
    except (UnicodeDecodeError, ValueError, OverflowError, pa.ArrowException):
        return [_one_cell(array[index], column=column) for index in range(len(array))]


def _checked(cells: list[Any], *, column: str) -> list[Any]:
    """Text inside nested binary cells is decoded too."""
    nested = next((cell for cell in cells if cell is not None), None)
    if not isinstance(nested, (list, dict)):
        return cells
    return [_decoded(cell, column=column) for cell in cells]


def _decoded(cell: Any, *, column: str) -> Any:
    try:
        return _decode(cell)
    except UnicodeDecodeError as error:
        return BadCell(f"column {column!r} is not valid UTF-8 at byte {error.start}")


def _decode(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    return value


def _one_cell(cell: pa.Scalar, *, column: str) -> Any:
    try:
        return _decode(cell.as_py())
    except UnicodeDecodeError as error:
        return BadCell(f"column {column!r} is not valid UTF-8 at byte {error.start}")
    except (ValueError, OverflowError, pa.ArrowException) as error:
        return BadCell(f"column {column!r} cannot be read: {str(error).splitlines()[0]}")


def carried_column(array: pa.Array, field: pa.Field) -> tuple[pa.Array, np.ndarray]:
    """The column as the output holds it, and bool `[rows]`: the cells that no reader would accept, made null."""
    array = plain_column(array)
    if array.type != field.type:
        array = array.cast(field.type)
    bad = np.zeros(len(array), dtype=bool)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        for index in range(len(array)):
            try:
                array.slice(index, 1).validate(full=True)
            except pa.ArrowInvalid:
                bad[index] = True
        array = array.take(pa.array(np.arange(len(array)), mask=bad))
    return array, bad
