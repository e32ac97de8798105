"""Reading YAML for a job: the value, and where each key stands, so that an error can name file, line and key."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from batchllm.bounded_files import read_whole
from batchllm.data.places import place_mistake
from batchllm.errors import JobError

Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class JobSource:
    """A job file's plain value (dicts, lists, scalars) and the origin of each location (`file:line` or `--set …`)."""

    path: Path
    value: dict[str, Any]
    origins: dict[Location, str]

    def origin(self, location: Location) -> str:
        """Where the deepest known part of `location` was written."""
        for length in range(len(location), 0, -1):
            if location[:length] in self.origins:
                return self.origins[location[:length]]
        return str(self.path)


class _JobLoader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2: `1e-5` is a number, `yes`, `06:00` and `2026-11-29` are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is written twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
        list("-+0123456789."),
    ),
    ("merge", r"^(?:<<)$", ["<"]),
):
    _JobLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


_PROBLEMS = {
    "but found another document": "a second YAML document begins here; a job file holds one, so remove the line ---",
    "found unhashable key": "text that begins with {{ must stand in quotes; without them YAML reads a mapping",
}
"""What YAML calls a mistake that job files invite, and what to do about it."""


def _parse(text: str, *, name: str) -> tuple[Any, yaml.Node | None]:
    try:
        loader = _JobLoader(text)
    except yaml.YAMLError as error:
        raise JobError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        is_file = not name.startswith("--set ")
        line = f":{mark.line + 1}" if mark is not None and is_file else ""
        problem = str(error.problem or error.context)
        raise JobError(f"{name}{line}: {_PROBLEMS.get(problem, f'not valid YAML: {problem}')}") from None
    except (KeyError, IndexError, AttributeError):
        # What PyYAML raises of a text that is none of the type that an explicit tag names.
        raise JobError(f"{name}: not valid YAML: a tag such as !!int stands before text of another type") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise JobError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    finally:
        loader.dispose()


def _collect_origins(node: yaml.Node, *, at: Location, name: str, origins: dict[Location, str], seen: set[int]) -> None:
    """An alias points to a node that was visited before, perhaps to one that holds it: each node is visited once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*at, str(getattr(key, "value", "")))
            if here not in origins:
                origins[here] = f"{name}:{key.start_mark.line + 1}"
                _collect_origins(value, at=here, name=name, origins=origins, seen=seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            if (*at, index) not in origins:
                origins[(*at, index)] = f"{name}:{value.start_mark.line + 1}"
                _collect_origins(value, at=(*at, index), name=name, origins=origins, seen=seen)


def read_job_file(path: Path, *, overrides: Sequence[str]) -> JobSource:
    """The file's value with `key.key=value` overrides applied (the value is YAML). Raises JobError."""
    mistake = place_mistake(str(path))
    if mistake is not None:
        raise JobError(f"the name of the job file {mistake}")
    try:
        text = read_whole(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise JobError(f"{path}: there is no such job file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(f"{path}: the job file cannot be read: {reason}") from None
    value, node = _parse(text, name=str(path))
    if not isinstance(value, dict) or node is None:
        raise JobError(f"{path}: a job file is a mapping of keys such as model, input and prompt")
    origins: dict[Location, str] = {}
    _collect_origins(node, at=(), name=str(path), origins=origins, seen=set())
    for override in overrides:
        _apply_override(override, value=value, origins=origins)
    return JobSource(path=path, value=value, origins=origins)


_MOST_SHOWN = 200


def _apply_override(override: str, *, value: dict[str, Any], origins: dict[Location, str]) -> None:
    name = f"--set {override if len(override) <= _MOST_SHOWN else override[:_MOST_SHOWN] + '…'}"
    key, equals, text = override.partition("=")
    parts = tuple(key.strip().split("."))
    if not equals or not all(parts):
        raise JobError(f"{name}: write it as key.key=value, for example engine.block_size=32")
    new, _ = _parse(text, name=name)
    target = value
    for depth, part in enumerate(parts[:-1], start=1):
        below = target.get(part)
        if below is None:
            below = target[part] = {}
            origins[parts[:depth]] = name
        if not isinstance(below, dict):
            raise JobError(f"{name}: {'.'.join(parts[:depth])} is not a mapping in the job file")
        target = below
    target[parts[-1]] = new
    for location in [location for location in origins if location[: len(parts)] == parts]:
        del origins[location]
    origins[parts] = name


_VARIABLE = re.compile(r"\{\{\s*(.*?)\s*\}\}", re.DOTALL)
_DATE = re.compile(r"date(?:\s*([-+])\s*(\d{1,6})\s*([hdw]))?")
_HOURS = {"h": 1, "d": 24, "w": 24 * 7}


def fill_dates(text: str, *, date: datetime.date) -> str:
    """`{{ date }}`, `{{ date - 1d }}`, `+ 2w`, `- 3h` in a path or an SQL text. Raises ValueError for others.

    Days and weeks print as 2026-11-29; hours count from midnight and print as 2026-11-28T21.
    """

    def fill(match: re.Match[str]) -> str:
        variable = _DATE.fullmatch(match[1])
        if variable is None:
            raise ValueError(f"{match[0]} is not known here; write {{{{ date }}}} or {{{{ date - 1d }}}} (h, d or w)")
        sign, count, unit = variable.groups()
        if sign is None:
            return date.isoformat()
        hours = int(count) * _HOURS[unit] * (-1 if sign == "-" else 1)
        try:
            moment = datetime.datetime.combine(date, datetime.time()) + datetime.timedelta(hours=hours)
        except OverflowError:
            raise ValueError(f"{match[0]} lies outside the calendar") from None
        return moment.strftime("%Y-%m-%dT%H") if unit == "h" else moment.date().isoformat()

    return _VARIABLE.sub(fill, text)
