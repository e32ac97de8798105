"""What a completion must be, as a section of a job file."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from batchllm.data.constraints import (
    check_grammar,
    check_length,
    choice_grammar,
    read_schema,
    regex_grammar,
    schema_grammar,
)
from batchllm.data.phrases import describe
from batchllm.data.section import ColumnName, PerRow, Section
from batchllm.prompt import Grammar


def _checked_schema(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("must be Unicode text, which holds no half of a surrogate pair") from None
        grammar = schema_grammar(value)
        check_length(value)
        check_grammar(grammar)
    return value


def _label_list(value: object) -> object:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("must be a list of at least one label")
    return value


def _distinct_labels(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) != len(value):
        raise ValueError("names a label twice")
    return value


def _checked_labels(value: tuple[str, ...]) -> tuple[str, ...]:
    check_grammar(choice_grammar(value))
    return value


def _checked_regex(value: str | None) -> str | None:
    if value is not None:
        check_grammar(regex_grammar(value))
    return value


_Labels = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(strict=False),
    BeforeValidator(_label_list),
    AfterValidator(_distinct_labels),
]
_ROW_LABELS: TypeAdapter[tuple[str, ...]] = TypeAdapter(_Labels, config=ConfigDict(strict=True))


class ConstraintSection(Section):
    """What every completion must be; at most one of these, all checked when the job is loaded.

    `schema`: JSON that a JSON Schema takes (a mapping, or the path of a .json file). `choice`: one of these
    labels, or of those in a column that holds a list of labels for each row. `regex`: text that a regular expression matches from start to end. A completion that reaches `max_tokens` first is
    cut inside its form; its `finish_reason` says `length`.
    """

    json_schema: Annotated[
        dict[str, Any] | None,
        Field(alias="schema"),
        BeforeValidator(read_schema),
        AfterValidator(_checked_schema),
        WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1}]}),
    ] = None
    choice: PerRow[Annotated[_Labels, AfterValidator(_checked_labels)] | None] = None
    regex: Annotated[str | None, Field(min_length=1), AfterValidator(_checked_regex)] = None

    @model_validator(mode="after")
    def _one_constraint(self) -> ConstraintSection:
        given = [name for name, value in self.constraint_values().items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"takes one of schema, choice and regex, not {' and '.join(given)}")
        return self

    @property
    def choice_column(self) -> str | None:
        """The column that holds each row's labels."""
        return self.choice.column if isinstance(self.choice, ColumnName) else None

    def constraint_values(self) -> dict[str, object]:
        """What was given under the keys of the job file, as plain JSON values."""
        choice: object = list(self.choice) if isinstance(self.choice, tuple) else self.choice
        if isinstance(choice, ColumnName):
            choice = {"column": choice.column}
        return {"schema": self.json_schema, "choice": choice, "regex": self.regex}

    def grammar(self) -> Grammar | None:
        """The constraint of all rows for the engine; None: free text, or labels that are each row's own."""
        if self.json_schema is not None:
            return schema_grammar(self.json_schema)
        if isinstance(self.choice, tuple):
            return choice_grammar(self.choice)
        return None if self.regex is None else regex_grammar(self.regex)


def row_choice(cell: object, *, column: str) -> Grammar:
    """The labels of one row as a grammar. Raises ValueError that names the column."""
    try:
        return choice_grammar(_ROW_LABELS.validate_python(cell))
    except ValidationError as error:
        raise ValueError(
            f"column {column!r} as output.choice: {describe(error.errors(include_url=False)[0])}"
        ) from None
