"""What every section of a job file is, and a value that may be taken from a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag


class Section(BaseModel):
    """A mapping of the job file: frozen, strict, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)


class ColumnName(Section):
    """`{column: name}`: the value is taken from that input column, row by row."""

    column: Annotated[str, Field(min_length=1)]


_Value = TypeVar("_Value")


def _kind_of_value(value: object) -> str:
    return (
        "column"
        if isinstance(value, Mapping) and set(value) == {"column"} or isinstance(value, ColumnName)
        else "value"
    )


PerRow = Annotated[
    Annotated[_Value, Tag("value")] | Annotated[ColumnName, Tag("column")],
    Discriminator(_kind_of_value),
]
