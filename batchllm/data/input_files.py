"""Which files `input.path` names, and which kind of table they are by their names."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from batchllm.data.places import place_mistake
from batchllm.errors import InputError

TableKind = Literal["Parquet", "CSV", "JSON lines"]

_TEXT_KINDS: dict[str, TableKind] = {".csv": "CSV", ".tsv": "CSV", ".jsonl": "JSON lines", ".ndjson": "JSON lines"}
_PARQUET = (".parquet", ".pq")


def table_kind(path: Path) -> TableKind:
    """By the name, perhaps with .gz or .zst behind it; what no other kind claims is Parquet."""
    return _TEXT_KINDS.get(_suffix(path.name), "Parquet")


def find_files(path: str) -> tuple[Path, ...]:
    """A file, a glob (`**` descends) or a folder's Parquet files, sorted by name; hidden and `_` files are skipped.

    Raises InputError when there is none, where a name is not Unicode, or where the glob or the folder has tables of several kinds: one of
    them would go unread.
    """
    found = _find(path)
    for file in found:
        mistake = place_mistake(str(file))
        if mistake is not None:
            raise InputError(f"input.path: {path}: the name of {os.fsencode(file)!r} {mistake}")
    return found


def _find(path: str) -> tuple[Path, ...]:
    place = Path(path)
    if place.is_file():
        return (place,)
    if place.is_dir():
        return _files_of_folder(place)
    if any(character in path for character in "*?["):
        matches = sorted(Path(match) for match in glob.glob(path, recursive=True))
        found = [match for match in matches if match.is_file() and match.name[0] not in "._"]
        if not found:
            raise InputError(f"input.path: {path}: no file matches")
        _check_one_kind(found, what=f"{path}: matches")
        return tuple(found)
    raise InputError(f"input.path: {path}: there is no such file or folder")


def _files_of_folder(folder: Path) -> tuple[Path, ...]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    tables = [folder / name for name in names if name[0] not in "._" and _suffix(name) in (*_PARQUET, *_TEXT_KINDS)]
    _check_one_kind(tables, what=f"{folder}: the folder holds")
    if not tables:
        raise InputError(f"input.path: {folder}: the folder holds no Parquet file")
    if table_kind(tables[0]) != "Parquet":
        raise InputError(
            f"input.path: {folder}: the folder holds no Parquet file; "
            f"its {table_kind(tables[0])} files are named by a glob, such as {_glob_beside(tables[0])}"
        )
    return tuple(tables)


def _check_one_kind(files: Sequence[Path], *, what: str) -> None:
    first: dict[TableKind, Path] = {}
    for path in files:
        first.setdefault(table_kind(path), path)
    if len(first) > 1:
        kinds = " and ".join(f"{kind} ({path.name})" for kind, path in first.items())
        raise InputError(
            f"input.path: {what} {kinds}; name the files of one kind by a glob, such as {_glob_beside(files[0])}"
        )


def _glob_beside(path: Path) -> Path:
    return path.with_name(f"*{''.join(path.suffixes[-2:]) if path.suffix in _PACKED else path.suffix}")


_PACKED = (".gz", ".zst")


def _suffix(name: str) -> str:
    return Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
