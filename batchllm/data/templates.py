"""Jinja2 templates over rows: a sandbox, the columns that a template reads, and cells that may not be there."""

from __future__ import annotations

import datetime
import difflib
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from batchllm.data.sandbox import BoundedSandbox


class NullCell(jinja2.StrictUndefined):
    """A null cell: printing or using it is an error that names the column; `{% if note %}` takes it for false."""

    __slots__ = ()

    def __bool__(self) -> bool:  # type: ignore[override]
        return False


def null_cell(column: str) -> NullCell:
    """The value that a template sees for a null in `column`."""
    return NullCell(hint=f"column {column!r} is null")


_ROW_ENVIRONMENT = BoundedSandbox(
    undefined=jinja2.StrictUndefined, extensions=["jinja2.ext.loopcontrols"], auto_reload=False
)


def compile_template(text: str) -> jinja2.Template:
    """A job's template. Raises jinja2.TemplateSyntaxError, also for filters that do not exist."""
    return _ROW_ENVIRONMENT.from_string(text)


def parse_template(text: str) -> nodes.Template:
    """A job's template as a tree. Raises jinja2.TemplateSyntaxError."""
    return _ROW_ENVIRONMENT.parse(text)


def template_columns(text: str, *, columns: Sequence[str]) -> list[str]:
    """The input columns that a template reads, in input order. Raises ValueError naming one that is not there.

    `row` is the whole row, for names that are no identifiers: `{{ row["review text"] }}`. `date` is the run's date
    where no column has that name.
    """
    tree = _ROW_ENVIRONMENT.parse(text)
    wanted = set(find_undeclared_variables(tree))
    if "row" in wanted and "row" not in columns:
        wanted.discard("row")
        wanted |= _row_keys(tree, columns=columns)
    known = {*columns, "date", *_ROW_ENVIRONMENT.globals}
    for name in sorted(wanted):
        if name not in known:
            near = difflib.get_close_matches(name, columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; its columns: {', '.join(columns)}"
            raise ValueError(f"the template names column {name!r}, which the input lacks{hint}")
    return [name for name in columns if name in wanted]


def _row_keys(tree: nodes.Template, *, columns: Sequence[str]) -> set[str]:
    """What is taken from `row`: constant keys where all uses are such, else every column."""
    keys: set[str] = set()
    num_uses = sum(name.name == "row" for name in tree.find_all(nodes.Name))
    for attribute in tree.find_all(nodes.Getattr):
        if isinstance(attribute.node, nodes.Name) and attribute.node.name == "row":
            keys.add(attribute.attr)
            num_uses -= 1
    for item in tree.find_all(nodes.Getitem):
        is_row = isinstance(item.node, nodes.Name) and item.node.name == "row"
        if is_row and isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str):
            keys.add(item.arg.value)
            num_uses -= 1
    return set(columns) if num_uses else keys


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it prints what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_chat_template(text: str, *, date: datetime.date) -> jinja2.Template:
    """A model's chat template in the dialect that its authors expect, with the clock stopped at `date`.

    Raises jinja2.TemplateSyntaxError.
    """
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag], auto_reload=False
    )
    moment = datetime.datetime.combine(date, datetime.time())
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _stopped_clock(moment)
    environment.globals["date_string"] = moment.strftime("%d %b %Y")
    environment.filters["tojson"] = _tojson
    return environment.from_string(text)


def _stopped_clock(moment: datetime.datetime) -> Callable[[str], str]:
    return lambda form: moment.strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Plain JSON: Jinja2's own filter escapes `<` and `&` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
