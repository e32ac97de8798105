"""What a completion must be: a JSON Schema, one of some labels, or a regular expression, as grammars of `llguidance`.

All are checked when a job is loaded, without a model.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from batchllm.bounded_files import read_whole
from batchllm.prompt import Grammar

# JSON as `json.dumps` spaces it. Free white space would let a weak model write blanks until its tokens are spent.
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$#&~/-])")


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """JSON that the schema takes. Raises ValueError for a schema that is wrong, cannot be met, or uses a keyword that is not enforced."""
    text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_FORM)  # type: ignore[arg-type]
    return _checked("schema", text)


def choice_grammar(labels: Sequence[str]) -> Grammar:
    """Exactly one of the labels. Raises ValueError."""
    return _checked("choice", LLMatcher.grammar_from_regex("|".join(_SPECIAL.sub(r"\\\1", label) for label in labels)))


def regex_grammar(pattern: str) -> Grammar:
    """Text that the pattern (Rust's syntax, without look-around) matches from start to end. Raises ValueError."""
    return _checked("regex", LLMatcher.grammar_from_regex(pattern))


def check_grammar(grammar: Grammar) -> None:
    """Raises ValueError for a grammar that is well formed and that no row could keep to: too large, or without any text that fits.

    Asked over single bytes, so no model is needed.
    """
    matcher = LLMatcher(_byte_tokenizer(), grammar.text, log_level=0)
    fits_any = any(matcher.compute_bitmask())
    reason = _reason(matcher.get_error()) if matcher.is_error() else ""
    if reason and reason != _NOTHING_FITS:
        raise ValueError(f"cannot be kept to: {reason}")
    if reason or not fits_any:
        raise ValueError("cannot be kept to: no text fits")
    _write_one(matcher)
    # A text that leads nowhere is not held against the form: another one may be whole.
    reason = _reason(matcher.get_error()) if matcher.is_error() else ""
    if _TOO_LARGE in reason.lower():
        reason = reason.partition("; try ")[0]
        raise ValueError(f"cannot be kept to: {reason}; repeat less in it (as with {{n}}, minItems and minLength)")


_NOTHING_FITS = "NoExtensionBias"
"""What the library says of a form that no text has."""
_TOO_LARGE = "too many"
_PROBED_STEPS = 1000
_PROBED_BYTES = 100_000
_CLOSING = {byte: place for place, byte in enumerate(b'"]},:0')}
"""What leads to the end of JSON, the soonest first. Other bytes come last, and in turn."""


def _write_one(matcher: LLMatcher) -> None:
    """Writes a text, as short as is easily found, until it is whole, long enough, or the matcher fails.

    What is too large for the library often fails behind the first token only.
    """
    num_bytes, times_taken = 0, Counter[int]()
    for _ in range(_PROBED_STEPS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if matcher.is_error() or matcher.is_accepting() or not allowed or num_bytes > _PROBED_BYTES:
            return
        text = matcher.compute_ff_tokens()
        if not text:
            text = [min(allowed, key=lambda byte: (_CLOSING.get(byte, len(_CLOSING)), times_taken[byte]))]
            times_taken[text[0]] += 1
        matcher.consume_tokens(text)
        num_bytes += len(text)


def check_length(schema: Mapping[str, Any]) -> None:
    """Raises ValueError for a schema whose shortest text is longer than any completion, such as one with `minItems: 1000000`."""
    shortest = _shortest(schema)
    if shortest > _LONGEST_FORM:
        raise ValueError(
            f"cannot be kept to: its shortest text has more than {_LONGEST_FORM} characters; make minItems, minLength or minProperties smaller"
        )


_LONGEST_FORM = 1_000_000


def _shortest(schema: object) -> int:
    """Characters that every text of the schema has at least. What `$ref` and the like add is not counted."""
    if not isinstance(schema, Mapping):
        return 1
    type_ = schema.get("type")
    if type_ == "string":
        return 2 + _count(schema, "minLength")
    if type_ == "array":
        first, num_items = schema.get("prefixItems"), _count(schema, "minItems")
        items = [_shortest(item) for item in first[:num_items]] if isinstance(first, list) else []
        return 2 + sum(items) + (num_items - len(items)) * _shortest(schema.get("items")) + 2 * max(num_items - 1, 0)
    if type_ == "object":
        named, required = schema.get("properties"), schema.get("required")
        named = named if isinstance(named, Mapping) else {}
        required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        values = sum(len(name) + 4 + _shortest(named.get(name)) for name in required)
        return 2 + max(values, 5 * _count(schema, "minProperties"))
    return 1


def _count(schema: Mapping[str, Any], key: str) -> int:
    value = schema.get(key)
    return int(value) if isinstance(value, (int, float)) and value > 0 else 0


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def read_schema(value: object) -> object:
    """A mapping as it is; a text is the path of a JSON file with one. Raises ValueError naming the file."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(read_whole(Path(value)).decode())
    except FileNotFoundError:
        raise ValueError(f"there is no file {value}") from None
    except OSError as error:
        raise ValueError(f"{value} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{value} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{value} holds no JSON object")
    return schema


def _checked(kind: str, text: str) -> Grammar:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text)
    if is_error:
        raise ValueError(_reason(messages[0]))
    return Grammar(kind=kind, text=text)


def _reason(message: str) -> str:
    """The library's report in one line: of a regex, the sentence after the picture."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return f"not a valid regular expression: {named[0]}" if named else lines[0]
