"""What every section of a job file is, and a value that may be taken from a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from batchllm.data.places import checked_place


class Section(BaseModel):
    """A mapping of the job file: frozen, strict, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)


def _checked_text(text: str) -> str:
    # YAML can write half of a surrogate pair, which no file can hold.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be Unicode text, which its character {error.start + 1} is not") from None
    return text


def _checked_argument(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a NUL character")
    return _checked_text(text)


def _checked_name(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be made of printable characters")
    return text


Text = Annotated[str, AfterValidator(_checked_text)]
"""Any text that can be written down."""

Argument = Annotated[str, AfterValidator(_checked_argument)]
"""Text that a program or a library in C is handed."""

Place = Annotated[str, Field(min_length=1), AfterValidator(checked_place)]
"""A path."""

Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_checked_name)]
"""A text of one line, of which names of files and metrics are made."""


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
