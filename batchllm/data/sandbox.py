"""The sandbox that every template runs in: no way out of it, and no single operation that makes a giant value.

Jinja2's own sandbox keeps templates from Python's internals, but `'x' * 10**10` is harmless to it, and is folded when the template is compiled.
Operations that can multiply a size are checked before they are done; checked operators are not folded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sized
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RESULT = 50_000_000
"""Characters, items or bits that one operation of a template may make: far above any prompt, far below a machine's memory."""

_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_PADDING_FILTERS = frozenset({"center", "indent", "format", "wordwrap"})
_WIDTH = re.compile(r"[%:{][^%{}a-zA-Z]*\d{8,}")
_NESTED = re.compile(r":[^{}]*\{")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """`ImmutableSandboxedEnvironment` in which `*`, `**`, `%` and padding refuse, as SecurityError, what would be too large."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in _PADDING_FILTERS:
            self.filters[name] = _bounded_filter(name, self.filters[name])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for size, count in ((left, right), (right, left)):
                if isinstance(size, Sized) and isinstance(count, int) and len(size) * count > MAX_RESULT:
                    raise SecurityError(f"{len(size)} * {count} items are too many")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_RESULT // 1000:
                raise SecurityError(f"a number of about {left.bit_length() * right} bits is too large")
        elif operator == "%" and isinstance(left, (str, bytes)):
            text = left if isinstance(left, str) else left.decode("latin-1")
            _check_text(text)
            if "*" in text:
                # A width that is an argument.
                _check_widths(right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, callee: Any, *arguments: Any, **named: Any) -> Any:
        # Jinja2 hands `str.format` out in a wrapper of its own.
        owner = getattr(getattr(callee, "__wrapped__", callee), "__self__", None)
        if isinstance(owner, (str, bytes)):
            if callee.__name__ in _PADDING_METHODS:
                _check_widths((*arguments, *named.values()))
            elif callee.__name__ == "format":
                _check_text(str(owner))
                if _NESTED.search(str(owner)):
                    _check_widths((*arguments, *named.values()))
        return super().call(context, callee, *arguments, **named)


def _bounded_filter(name: str, function: Any) -> Any:
    def check(*arguments: Any, **named: Any) -> Any:
        if name == "format":
            text = next((value for value in arguments if isinstance(value, str)), "")
            _check_text(text)
            if "*" not in text:
                return function(*arguments, **named)
        _check_widths((*arguments, *named.values()))
        return function(*arguments, **named)

    # Some filters are handed the environment or the context: the mark that says so is kept.
    return functools.wraps(function)(check)


def _check_widths(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_RESULT:
            raise SecurityError(f"a width of {value} is too large")


def _check_text(text: str) -> None:
    found = _WIDTH.search(text)
    if found:
        raise SecurityError(f"the width in {found[0][:30]!r} is too large")
