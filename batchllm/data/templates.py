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
from batchllm.data.template_formats import check_date_form


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


_LONGEST_TEMPLATE = 1_000_000
_MOST_NODES = 20_000
"""Of a template's tree; one takes some 30 µs to compile."""

_OTHER_TEMPLATES: tuple[type[nodes.Node], ...] = (nodes.Include, nodes.Extends, nodes.Import, nodes.FromImport)


def compile_template(text: str) -> jinja2.Template:
    """A job's template. Raises ValueError, one line that begins with `not a valid template`, also for filters that do not exist."""
    return _compiled(_ROW_ENVIRONMENT, text)


def _compiled(environment: BoundedSandbox, text: str) -> jinja2.Template:
    if len(text) > _LONGEST_TEMPLATE:
        raise ValueError(
            f"not a valid template: it has {len(text):,} characters, at most {_LONGEST_TEMPLATE:,} are taken"
        )
    try:
        text.encode()
        tree = environment.parse(text)
        if sum(1 for _ in tree.find_all(nodes.Node)) > _MOST_NODES:
            raise ValueError("not a valid template: it has too many expressions")
        if next(tree.find_all(_OTHER_TEMPLATES), None) is not None:
            raise ValueError("not a valid template: there are no others that it could include, import or extend")
        return environment.from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"not a valid template, at its line {error.lineno}: {error.message}") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"not a valid template: its character {error.start + 1} is no Unicode text") from None
    # Templates become Python, which has a limit of its own.
    except (SyntaxError, RecursionError):
        raise ValueError("not a valid template: it is nested too deeply") from None


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

    Raises ValueError as `compile_template` does.
    """
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag], auto_reload=False
    )
    moment = datetime.datetime.combine(date, datetime.time())
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _stopped_clock(moment)
    environment.globals["date_string"] = moment.strftime("%d %b %Y")
    environment.filters["tojson"] = _tojson
    return _compiled(environment, text)


def _stopped_clock(moment: datetime.datetime) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        check_date_form(form)
        return moment.strftime(form)

    return strftime_now


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Plain JSON: Jinja2's own filter escapes `<` and `&` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
