"""The explicit schema of the output parts, and how input types are carried into it."""

from __future__ import annotations

import pyarrow as pa

from batchllm.data.sections import InputSection
from batchllm.errors import JobError

_TOP = pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())]))
LOGPROBS = pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("top", _TOP)]))

FIRST_FIELDS = [pa.field("row_index", pa.int64(), nullable=False), pa.field("sample_index", pa.int32(), nullable=False)]
COMPLETION_FIELDS = [
    pa.field("completion", pa.string()),
    pa.field("finish_reason", pa.string(), nullable=False),
    pa.field("stop_reason", pa.string()),
    pa.field("error", pa.string()),
    pa.field("prompt_tokens", pa.int64()),
    pa.field("cached_tokens", pa.int64()),
    pa.field("restored_tokens", pa.int64()),
    pa.field("completion_tokens", pa.int64()),
    pa.field("queue_s", pa.float64()),
    pa.field("ttft_s", pa.float64()),
    pa.field("tpot_s", pa.float64()),
    pa.field("e2e_s", pa.float64()),
    pa.field("preemptions", pa.int64()),
    pa.field("run_id", pa.string(), nullable=False),
    pa.field("model", pa.string(), nullable=False),
]
TOKEN_IDS = pa.field("token_ids", pa.list_(pa.int32()))
_ALL_NAMES = [
    *(field.name for field in FIRST_FIELDS),
    "id",
    *(field.name for field in COMPLETION_FIELDS),
    "token_ids",
    "logprobs",
]


def carried_type(type_: pa.DataType) -> pa.DataType:
    """The type under which an input column is written: dictionaries and views become their plain types, deep down."""
    if isinstance(type_, pa.BaseExtensionType):
        return carried_type(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return carried_type(type_.value_type)
    if pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(carried_type(field.type)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(carried_type(type_.key_type), carried_type(type_.item_type))
    if pa.types.is_fixed_size_list(type_) or pa.types.is_list(type_) or pa.types.is_list_view(type_):
        return pa.list_(type_.value_field.with_type(carried_type(type_.value_type)))
    if pa.types.is_large_list(type_) or pa.types.is_large_list_view(type_):
        return pa.large_list(type_.value_field.with_type(carried_type(type_.value_type)))
    return type_


def carried_fields(section: InputSection, schema: pa.Schema) -> list[pa.Field]:
    """`id` (null text where the job names none) and the kept columns, as they are written.

    Raises JobError where a kept column has the name of an output column (DuckDB does not tell case apart).
    """
    id_type = carried_type(schema.field(section.id).type) if section.id is not None else pa.string()
    own = {name.lower() for name in _ALL_NAMES}
    taken: set[str] = set()
    for name in section.keep:
        if name.lower() in own:
            raise JobError(f"input.keep: {name!r} is a column of the output itself; rename it with input.sql")
        if name.lower() in taken:
            raise JobError(
                f"input.keep: {name!r} differs from another kept column in case only; rename it with input.sql"
            )
        taken.add(name.lower())
    return [pa.field("id", id_type)] + [pa.field(name, carried_type(schema.field(name).type)) for name in section.keep]


def completion_schema(carried: list[pa.Field], *, with_token_ids: bool, with_logprobs: bool) -> pa.Schema:
    """The schema of every part of a run."""
    fields = [*FIRST_FIELDS, *carried, *COMPLETION_FIELDS]
    if with_token_ids:
        fields.append(TOKEN_IDS)
    if with_logprobs:
        fields.append(pa.field("logprobs", LOGPROBS))
    return pa.schema(fields)
