"""What a completion must be: a JSON Schema, one of some labels, or a regular expression, as grammars of `llguidance`.

All are checked when a job is loaded, without a model.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

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
    """Raises ValueError for a grammar that is well formed and still makes no first token: too large, or without any text that fits.

    Asked over single bytes, so no model is needed. What is refused here would be an error in every row.
    """
    matcher = LLMatcher(_byte_tokenizer(), grammar.text, log_level=0)
    mask = matcher.compute_bitmask()
    reason = _reason(matcher.get_error()) if matcher.is_error() else ""
    if reason and reason != _NOTHING_FITS:
        raise ValueError(f"cannot be kept to: {reason}")
    if reason or not any(mask):
        raise ValueError("cannot be kept to: no text fits")


_NOTHING_FITS = "NoExtensionBias"
"""What the library says of a form that no text has."""


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def read_schema(value: object) -> object:
    """A mapping as it is; a text is the path of a JSON file with one. Raises ValueError naming the file."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(Path(value).read_text(encoding="utf-8"))
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
