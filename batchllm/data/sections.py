"""The parts of a job file that the data layer reads, as pydantic models: input, prompt, sampling, output.

Every key has one reader. Values are taken strictly (a quoted number is no number), unknown keys are refused.
`batchllm.job` puts these together, resolves paths and dates, and turns errors into lines of the job file.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from batchllm.data.constraint_section import ConstraintSection
from batchllm.data.phrases import describe
from batchllm.data.section import Argument, ColumnName, PerRow, Place, Section, Text
from batchllm.data.templates import compile_template
from batchllm.prompt import SamplingParams


class InputSection(Section):
    """Where the rows come from. Paths are absolute once the job is loaded; `sql` reads files from the job's folder.

    `openai_batch` is a file of requests, which bring their own prompts, ids and sampling. A job file names one of the
    three; a job made in Python may be given its rows when it runs.
    """

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [key]} for key in ("path", "sql", "openai_batch")]}
    )

    path: Place | None = None
    sql: Annotated[Argument, Field(min_length=1)] | None = None
    openai_batch: Place | None = None
    id: Annotated[str, Field(min_length=1)] | None = None
    keep: Annotated[tuple[Text, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _one_source(self) -> InputSection:
        if sum(source is not None for source in (self.path, self.sql, self.openai_batch)) > 1:
            raise ValueError("needs exactly one of path, sql and openai_batch")
        if self.openai_batch is not None and (self.id is not None or self.keep):
            raise ValueError("a batch file has no columns, so there is no id and nothing to keep; the id is custom_id")
        if len(set(self.keep)) != len(self.keep):
            raise ValueError("keep names a column twice")
        return self


def _checked_template(text: str | None) -> str | None:
    if text is not None:
        compile_template(text)
    return text


Template = Annotated[str | None, AfterValidator(_checked_template)]


class PromptSection(Section):
    """How a row becomes a prompt; in a job with stages, how a row becomes the prompt of one stage. `template` and `system` are Jinja2 over the row's columns and `date`.

    Text from cells is data: a control-token string in a cell (`<|im_end|>`) is encoded as plain text unless
    `allow_control_tokens`. A prompt above `max_prompt_tokens` (default: what the model's context leaves) is an error
    row, or is cut at its left or right end when `truncate` says so. The requests of a batch file need none of this but
    may be given `allow_control_tokens`, `max_prompt_tokens` and `truncate`.

    `continue: true`, in a later stage: the template's text is the next user turn of the previous stage's conversation.
    """

    template: Template = None
    messages: Annotated[str, Field(min_length=1)] | None = None
    system: Template = None
    raw: bool = False
    allow_control_tokens: bool = False
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    truncate: Literal[False, "left", "right"] = False
    continues: Annotated[bool, Field(alias="continue")] = False

    @model_validator(mode="after")
    def _one_kind(self) -> PromptSection:
        if self.template is not None and self.messages is not None:
            raise ValueError("needs exactly one of template and messages")
        if self.raw and self.messages is not None:
            raise ValueError("raw sends the template's text as it is, so it cannot be used with messages")
        if self.raw and self.system is not None:
            raise ValueError("raw has no chat template, so there is no place for system")
        if self.continues and (self.raw or self.system is not None or self.messages is not None):
            raise ValueError("continue adds a user turn to a conversation, so it takes a template and nothing else")
        return self


class OutputSection(ConstraintSection):
    """The folder of the completions, absolute once the job is loaded. `token_ids` adds a column with the ids.

    A job file names the folder; a job made in Python may leave it out.
    """

    path: Place = ""
    token_ids: bool = False


def _stop_strings(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _bias_pairs(value: object) -> object:
    """`{token id: bias}`, or the list of pairs that an Arrow map gives, as sorted pairs."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if not isinstance(value, (list, tuple)):
        raise ValueError("must map token ids to numbers")
    pairs: dict[int, float] = {}
    for item in value:
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise ValueError("must map token ids to numbers")
        token_id, bias = item
        if isinstance(token_id, str) and token_id.isascii() and token_id.isdecimal():
            token_id = int(token_id)
        if type(token_id) is not int or token_id < 0 or type(bias) not in (int, float) or not -1000 <= bias <= 1000:
            raise ValueError("must map token ids to numbers between -1000 and 1000")
        pairs[token_id] = float(bias)
    return tuple(sorted(pairs.items()))


_MOST_COUNTED = 1_000_000_000
"""Beyond any context; what is counted stays within 32 bits."""

_Count = Annotated[int, Field(ge=1, le=_MOST_COUNTED)]
_TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Seed = Annotated[int, Field(ge=0, lt=2**63)]


_Strings = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(strict=False),
    BeforeValidator(_stop_strings),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}
    ),
]
_Biases = Annotated[
    tuple[tuple[int, float], ...],
    Field(strict=False),
    BeforeValidator(_bias_pairs),
    WithJsonSchema(
        {"type": "object", "additionalProperties": {"type": "number"}, "propertyNames": {"pattern": "^[0-9]+$"}}
    ),
]


class SamplingSection(Section):
    """How completions are sampled: the fields of `SamplingParams`, each a value or `{column: name}`.

    A null in such a column takes the default of that field.
    """

    max_tokens: PerRow[_Count] = 64
    min_tokens: PerRow[Annotated[int, Field(ge=0)]] = 0
    # Beyond this all is alike, and far beyond it float32 has no numbers.
    temperature: PerRow[Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]] = 0.0
    top_k: PerRow[Annotated[int, Field(ge=-1)]] = 0
    top_p: PerRow[Annotated[float, Field(gt=0, le=1)]] = 1.0
    min_p: PerRow[Annotated[float, Field(ge=0, le=1)]] = 0.0
    repetition_penalty: PerRow[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = 1.0
    presence_penalty: PerRow[_Penalty] = 0.0
    frequency_penalty: PerRow[_Penalty] = 0.0
    logit_bias: PerRow[_Biases] = ()
    seed: PerRow[_Seed | None] = None
    n: PerRow[Annotated[int, Field(ge=1, le=1024)]] = 1
    logprobs: PerRow[Annotated[int, Field(ge=0, le=20)] | None] = None
    stop: PerRow[_Strings] = ()
    stop_token_ids: PerRow[_TokenIds] = ()
    ignore_eos: PerRow[bool] = False

    @model_validator(mode="after")
    def _in_order(self) -> SamplingSection:
        if isinstance(self.min_tokens, int) and isinstance(self.max_tokens, int) and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        return self

    def columns(self) -> dict[str, str]:
        """Field name → input column, for the fields that are taken row by row, in field order."""
        fields = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: value.column for name, value in fields if isinstance(value, ColumnName)}

    def params(self, row_values: Mapping[str, object] | None = None) -> SamplingParams:
        """The sampling of one row. `row_values`: field name → the row's cell, for the fields of `columns()`.

        Raises ValueError that names column and value where a cell does not fit.
        """
        columns = self.columns()
        fixed = {name: getattr(self, name) for name in type(self).model_fields if name not in columns}
        if not columns:
            return SamplingParams(**fixed)
        given = row_values or {}
        for name, column in columns.items():
            if isinstance(given.get(name), Mapping) and name != "logit_bias":
                raise ValueError(f"column {column!r} as sampling.{name}: a struct is no value for it")
        cells = {
            name: _plain_number(value, whole=name in _WHOLE_FIELDS)
            for name in columns
            if (value := given.get(name)) is not None
        }
        try:
            row = SamplingSection.model_validate({**fixed, **cells})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0]) if first["loc"] else next(iter(columns))
            raise ValueError(f"column {columns.get(name, name)!r} as sampling.{name}: {describe(first)}") from None
        return SamplingParams(**{name: getattr(row, name) for name in type(row).model_fields})


def request_params(
    section: SamplingSection, *, defaults: Mapping[str, object], values: Mapping[str, object]
) -> SamplingParams:
    """The sampling of a request: what it sets itself, else what the job's file sets, else `defaults`.

    Raises ValueError, one line, where these do not go together.
    """
    written = {name: getattr(section, name) for name in section.model_fields_set}
    try:
        row = SamplingSection.model_validate({**defaults, **written, **values})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(": ".join([*map(str, first["loc"][:1]), describe(first)])) from None
    return row.params()


_WHOLE_FIELDS = frozenset({"max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs"})


def _plain_number(value: object, *, whole: bool) -> object:
    """A table's number as Python's: decimals are floats, and a float that is whole may stand for an int (pandas)."""
    if isinstance(value, Decimal):
        value = float(value)
    if whole and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


class StageSection(Section):
    """One of several passes over the rows. Later ones may use its completion, `{{ stages.<name> }}`.

    `sampling` left out takes the job's. `output` says what this stage's completion must be.
    """

    name: Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
    prompt: PromptSection
    sampling: SamplingSection | None = None
    output: ConstraintSection = ConstraintSection()


class JobSections(Protocol):
    """What the data layer needs of a job; `batchllm.job.Job` is one."""

    @property
    def input(self) -> InputSection: ...
    @property
    def prompt(self) -> PromptSection: ...
    @property
    def sampling(self) -> SamplingSection: ...
    @property
    def output(self) -> OutputSection: ...
    @property
    def date(self) -> datetime.date: ...
    @property
    def folder(self) -> Path: ...
    def stage_jobs(self) -> Sequence[JobSections]: ...
