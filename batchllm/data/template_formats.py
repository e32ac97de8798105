"""Formats in templates (`%`, `format`, those of dates): what they would make, checked before they do.

Numbers in them are widths and precisions, and a width makes text out of nothing. So they stand in the format, where they are seen, and not in
a value; and a format has an end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError

from batchllm.data.template_budget import check, text_size

_LONGEST_FORM = 100_000
_MOST_WIDTH = 10_000
_ESCAPED = 10
"""Characters that one can become where a value is written as Python writes it: `%r`, `{!a}`."""

_DATE_FORM = 12
"""Characters that two of a date's form can become: `%c`."""

_PERCENT = re.compile(r"[%)][-+ #0]*(\d*)(?:\.(\d+))?[hlL]?(.?)", re.DOTALL)
"""Width, precision and kind of a field of `%`, whose flags may stand behind a name in parentheses."""

_PERCENT_STAR = re.compile(r"%[-+ #0]*(?:\d*\.)?\*")
_DATE_WIDTH = re.compile(r"%[-_0^#+EO ]*(\d+)")
_DIGITS = re.compile(r"\d+")


def check_percent(form: str | bytes, values: Sequence[Any]) -> None:
    """`form % values`."""
    text = _form_text(form)
    if _PERCENT_STAR.search(text.replace("%%", "")):
        _refuse_borrowed_width()
    fields = _PERCENT.findall(text)
    widths = [digits for width, precision, _ in fields for digits in (width, precision)]
    is_escaped = any(kind in ("r", "a") for *_, kind in fields)
    _check_fields(text, num_fields=len(fields), widths=widths, values=values, is_escaped=is_escaped)


def check_format(form: str, values: Sequence[Any]) -> None:
    """`form.format(*values)`."""
    text = _form_text(form)
    try:
        fields = [field for field in Formatter().parse(text) if field[1] is not None]
    except ValueError:
        return  # Python will say so
    specifications = [specification or "" for _, _, specification, _ in fields]
    if any("{" in specification for specification in specifications):
        _refuse_borrowed_width()
    widths = [digits for specification in specifications for digits in _DIGITS.findall(specification)]
    is_escaped = any(conversion in ("r", "a") for *_, conversion in fields)
    _check_fields(text, num_fields=len(fields), widths=widths, values=values, is_escaped=is_escaped)


def check_date_form(form: object) -> None:
    """`date.strftime(form)`."""
    if isinstance(form, str):
        text = _form_text(form)
        check(_DATE_FORM * len(text) + sum(_numbers(_DATE_WIDTH.findall(text))))


def _check_fields(
    text: str, *, num_fields: int, widths: Sequence[str], values: Sequence[Any], is_escaped: bool
) -> None:
    """Every field may be the longest value, in the greatest width."""
    longest = max(map(_field_size, values), default=0) * (_ESCAPED if is_escaped else 1)
    check(_DATE_FORM * len(text) + num_fields * (longest + max(_numbers(widths), default=0)))


def _field_size(value: Any) -> int:
    """A number may be written with a digit for each bit, and a mark after each four."""
    return 2 * value.bit_length() + 2 if isinstance(value, int) else text_size(value)


def _numbers(digits: Sequence[str]) -> list[int]:
    if any(len(number.lstrip("0")) > len(str(_MOST_WIDTH)) or int(number) > _MOST_WIDTH for number in digits if number):
        raise SecurityError(f"a width in a format is too large; at most {_MOST_WIDTH:,}")
    return [int(number) for number in digits if number]


def _refuse_borrowed_width() -> None:
    raise SecurityError("a format takes a width from another value; write it as a number in the format")


def _form_text(form: str | bytes) -> str:
    if len(form) > _LONGEST_FORM:
        raise SecurityError(f"a format of {len(form):,} characters is too long; at most {_LONGEST_FORM:,}")
    return form if isinstance(form, str) else form.decode("latin-1")
