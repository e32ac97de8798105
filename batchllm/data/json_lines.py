"""Which line of a file of JSON lines DuckDB means: it leaves blank ones out, counts one too many for some mistakes, and names none for others."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

_NAMED = re.compile(r'in file "(?P<file>.+)", .*?in line (?P<record>\d+)')
_NO_OBJECT = "expected records, but got non-record JSON"


def with_line(message: str, *, files: Sequence[Path]) -> str:
    """DuckDB's message about these files with the number of the line that is wrong, where such a line is found; else as it is."""
    try:
        return _with_line(message, files=files)
    except (OSError, pa.ArrowException):
        # What DuckDB says of the file is the mistake, and is said; that it cannot be read again is not.
        return message


def _with_line(message: str, *, files: Sequence[Path]) -> str:
    if _NO_OBJECT in message:
        for path in files:
            for line, data in _records(path):
                if _is_other_than_object(data):
                    return f"{path}, line {line}: is no JSON object"
        return message
    named = _NAMED.search(message)
    if named is None:
        return message
    said = int(named["record"])
    for record, (line, data) in enumerate(_records(Path(named["file"])), start=1):
        if record in (said - 1, said) and _is_wrong(data):
            return f"{message[: named.start('record')]}{line}{message[named.end('record') :]}"
        if record == said:
            break
    return message


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank, of a file that may be packed."""
    with pa.input_stream(path) as file:
        for line, data in enumerate(io.BufferedReader(file), start=1):
            if data.strip():
                yield line, data


def _is_wrong(data: bytes) -> bool:
    """Whether it is no JSON, or an object that has a key twice."""
    try:
        json.loads(data, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return True
    return False


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _is_other_than_object(data: bytes) -> bool:
    # What is no JSON here, a trailing comma say, may be some to DuckDB; its mistakes are others.
    try:
        return not isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False
