"""Operations of templates that can make far more than they are given: what each would make, checked before it does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import do_join
from jinja2.nodes import EvalContext
from jinja2.utils import pass_eval_context

from batchllm.data.template_budget import ITEM, MOST_CHARACTERS, check, checked, paid, spend, text_size, turns
from batchllm.data.template_formats import check_format, check_percent

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_LONGEST_NUMBER = 5000
_MOST_INDENT = 100
_LISTING = frozenset({"list", "sort", "unique", "batch", "slice", "map", "select", "reject", "groupby", "sum"})
_BY_WORDS = frozenset({"wordcount", "title", "urlize", "striptags", "urlencode", "wordwrap"})
_SEARCHING = frozenset(
    "find rfind index rindex count split rsplit partition rpartition strip lstrip rstrip replace".split()
)
_MOST_COMPARED = 1_000_000_000
_COMPARED = 1000
"""Characters that are compared in the time in which one is made."""

_ENCODED = 100
"""Bytes that a character can become where an encoding or a way to replace what it lacks is named."""

_JSON = 10
"""Characters that one can become in JSON or in Python's own form."""

_WORD = 4
"""Characters that one of a text stands for where all its words become a list."""


def _text(form: str | bytes) -> str:
    return form if isinstance(form, str) else form.decode("latin-1")


def check_search(text: Any, part: Any) -> None:
    """A look for `part` in `text`, of which every character may be compared with every other. Raises SecurityError."""
    if isinstance(text, (str, bytes)) and isinstance(part, (str, bytes)):
        compared = len(text) * len(part)
        if compared > _MOST_COMPARED:
            raise SecurityError(f"a look for {len(part):,} characters in {len(text):,} takes too long")
        spend(compared // _COMPARED)


def check_method(owner: str | bytes, name: str, values: Sequence[Any]) -> None:
    """A method of a text with these arguments."""
    if name in _SEARCHING and values:
        check_search(owner, values[0])
    sizes = [text_size(value) for value in values]
    widths = [abs(value) for value in values if isinstance(value, int)]
    if name in ("center", "ljust", "rjust", "zfill"):
        check(len(owner) + max(widths, default=0))
    elif name == "expandtabs":
        check(len(owner) + _text(owner).count("\t") * max(widths, default=8))
    elif name == "replace" and len(values) >= 2:
        check_replace(owner, values[0], values[1])
    elif name == "join":
        for value in values:
            check_join(owner, value)
    elif name == "translate":
        check(len(owner) * max((text_size(item) for value in values for item in _values(value)), default=0))
    elif name in ("encode", "decode"):
        check(len(owner) * (_ENCODED if values else 4))
    elif name in ("format", "format_map") and isinstance(owner, str):
        check_format(owner, [*values, *(item for value in values for item in _values(value))])
    elif name == "splitlines" and isinstance(owner, str):
        check(ITEM * sum(owner.count(end) for end in _LINE_ENDS))
    else:
        check(len(owner) + max(sizes, default=0))


def split(owner: str | bytes, name: str, sep: Any = None, maxsplit: int = -1) -> Any:
    """`owner.split` or `rsplit`, which give no more pieces than a rendering may have."""
    most = MOST_CHARACTERS // ITEM
    pieces = getattr(owner, name)(sep, most if maxsplit < 0 else min(maxsplit, most))
    check(ITEM * len(pieces))
    return pieces


def check_replace(text: Any, old: Any, new: Any) -> None:
    """`text.replace(old, new)`."""
    if isinstance(text, (str, bytes)) and isinstance(old, type(text)) and isinstance(new, type(text)):
        check(len(text) + _text(text).count(_text(old)) * len(new))


def check_join(separator: Any, items: Any) -> None:
    """`separator.join(items)`, the items being there already."""
    if isinstance(items, (str, bytes, list, tuple, dict, set, frozenset)):
        is_text = isinstance(items, (str, bytes))
        check((len(items) if is_text else sum(map(text_size, items))) + text_size(separator) * len(items))


def bounded_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The filters with a check before each, what it makes paid for."""
    return {name: _join if name == "join" else _bounded(name, function) for name, function in filters.items()}


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Some filters are handed the environment or the context first: the mark that says so is kept.
    num_passed = int(hasattr(function, "jinja_pass_arg"))

    def run(*arguments: Any, **named: Any) -> Any:
        if name == "sum" and len(arguments) > num_passed:
            # Its items may be made while it runs.
            arguments = (*arguments[:num_passed], list(turns(arguments[num_passed])), *arguments[num_passed + 1 :])
        values = arguments[num_passed:]
        for value in (*values, *named.values()):
            checked(value)
        _check_filter(name, values, named)
        return paid(function(*arguments, **named))

    return functools.wraps(function)(run)


@pass_eval_context
def _join(eval_ctx: EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    """The filter `join`. Its items may be made while it runs, so they are gathered first."""
    items = list(turns(value))
    check_join(d, items)
    return str(paid(do_join(eval_ctx, items, d, attribute)))


def _check_filter(name: str, values: Sequence[Any], named: Mapping[str, Any]) -> None:
    given = (*values[1:], *named.values())
    value = values[0] if values else ""
    text = value if isinstance(value, str) else ""
    widths = [abs(number) for number in given if isinstance(number, int)]
    if name in ("replace", "trim") and given:
        check_search(value, given[0])
    if name == "format":
        check_percent(text, given)
    elif name == "replace" and len(given) >= 2:
        check_replace(str(value), str(given[0]), str(given[1]))
    elif name == "indent":
        widths += [text_size(part) for part in given if isinstance(part, str)]
        check(len(text) + (1 + sum(text.count(end) for end in _LINE_ENDS)) * max(widths, default=4))
    elif name in ("center", "batch", "slice"):
        check(len(text) + max(widths, default=0) * (1 if name == "center" else ITEM))
    elif name in ("tojson", "pprint"):
        indent = max(widths, default=int(name == "pprint"))
        if indent > _MOST_INDENT:
            raise SecurityError(f"an indent of {indent} is too large")
        check(text_size(value) * (_JSON + indent * _depth(value, {})))
    elif name == "round" and max(widths, default=0) > _LONGEST_NUMBER:
        raise SecurityError(f"a precision of {max(widths)} is too large")
    elif name == "int" and (len(values) > 2 or "base" in named):
        # Python bounds the digits of base 10 by itself; a long text without a number has a default.
        _check_digits(text)
    elif name == "wordwrap":
        # What is left of a long word is copied for each line of it.
        longest = max(map(len, text.split()), default=0)
        check(longest * longest // max(min(widths, default=79), 1))
    elif name == "xmlattr":
        check(5 * text_size(value))
    if name in _LISTING:
        check(ITEM * len(text))
    elif name in _BY_WORDS:
        lengths = [text_size(part) for part in given if isinstance(part, (str, list))]
        check(len(text) * _WORD + (text.count(" ") + len(text) // 80 + 1) * sum(lengths))
    if name == "sum" and any(isinstance(part, (list, tuple)) for part in given):
        # Each sum copies those before it.
        check(len(value) * sum(len(part) for part in value if isinstance(part, (list, tuple))))


def _check_digits(text: str) -> None:
    """Raises SecurityError for a number of which arithmetic would not end."""
    if len(text) > _LONGEST_NUMBER:
        raise SecurityError(f"a number of {len(text):,} digits is too large")


def _values(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


def _depth(value: Any, seen: dict[int, int]) -> int:
    if not isinstance(value, (Mapping, list, tuple)):
        return 0
    if id(value) not in seen:
        seen[id(value)] = 0
        items = value.values() if isinstance(value, Mapping) else value
        seen[id(value)] = 1 + max((_depth(item, seen) for item in items), default=0)
    return seen[id(value)]
