"""What pydantic finds wrong, in one phrase with a verb that says what a value must be, and what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_PHRASES = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "string_unicode": "must be Unicode text",
    "string_too_long": "must have at most {max_length} characters",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
}
_EMPTY = {
    "string_too_short": "must not be empty",
    "too_short": "must hold at least {min_length}",
    "missing": "is missing",
}
_MOST_CHARACTERS = 60
_MOST_BITS = 1000


def describe(error: Mapping[str, Any]) -> str:
    """One of `ValidationError.errors()` without its jargon. What a validator of ours says stays as it is."""
    kind, context = error["type"], error.get("ctx") or {}
    if kind in _EMPTY:
        return _EMPTY[kind].format(**context)
    if kind in _PHRASES:
        return f"{_PHRASES[kind].format(**context)}, not {_shown(error.get('input'))}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message.replace("Input should be", "must be").replace("Input should", "must")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return "a number without end"
    # Characters that no terminal can show are escaped.
    text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"
