"""Output parts on disk: written aside, made durable, then made visible by one rename. A visible part is whole.

The parts are the only record of what is done. Each carries the run's fingerprint in its Parquet metadata.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm.errors import FolderError, OutputError, write_error

PART_NAME = re.compile(r"part-(\d{6,})-([A-Za-z0-9-]+)\.parquet")
_METADATA_KEY = b"batchllm"
STAGING_PREFIX = ".staging-"


def part_name(number: int, *, run_id: str) -> str:
    """The visible file name; parts of later runs continue the numbering."""
    return f"part-{number:06d}-{run_id}.parquet"


def visible_parts(folder: Path) -> list[Path]:
    """The parts in order of their number; an absent folder has none."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FolderError(f"{folder}: cannot be read: {error.strerror}") from None
    numbered = [(int(match[1]), name) for name in names if (match := PART_NAME.fullmatch(name))]
    return [folder / name for _, name in sorted(numbered)]


def write_part(table: pa.Table, path: Path, *, fingerprint: Mapping[str, object]) -> None:
    """Writes `table` so that `path` is either absent or whole and durable. Raises OutputError, leaving no torn file."""
    record = json.dumps({"fingerprint": fingerprint}, ensure_ascii=False, sort_keys=False)
    table = table.replace_schema_metadata({_METADATA_KEY: record.encode()})
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except (OSError, pa.ArrowException):
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise OutputError(
            f"{path}: completions cannot be written: {reason}; what is written is whole, running again does the rest"
        ) from None


def drop_error_rows(part: Path, *, below: int) -> int:
    """Takes the rows with an error out of a visible part, so that they run again; returns how many input rows that are.

    Only rows with an index under `below`. A row goes with all its samples. One rename puts the new part in the old
    one's place, so at every moment each other row is in exactly one visible part, and a row that is taken out is either
    still there with its error or not done. Raises FolderError or OutputError.
    """
    try:
        table = pq.read_table(part)
    except (OSError, pa.ArrowException) as error:
        raise FolderError(
            f"{part}: cannot be read: {str(error).splitlines()[0]}; remove the file to compute its rows again"
        ) from None
    row_index = table.column("row_index").to_numpy()
    has_error = table.column("error").is_valid().to_numpy() & (row_index < below)
    failed = np.unique(row_index[has_error])
    if failed.size == 0:
        return 0
    good = table.filter(pa.array(~np.isin(row_index, failed)))
    if good.num_rows:
        write_part(good, part, fingerprint=read_fingerprint(part))
    else:
        try:
            os.unlink(part)
            _sync_folder(part.parent)
        except OSError as error:
            raise write_error(f"{part}: its error rows cannot be taken out", error) from None
    return int(failed.size)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def clear_leftovers(folder: Path) -> None:
    """Removes what a killed run left: unfinished parts and staging folders. Only under the folder's lock."""
    for entry in os.scandir(folder):
        if entry.name.startswith((".part-", ".batch_", "..batch_")) and entry.name.endswith(".tmp"):
            os.unlink(entry.path)
        elif entry.name.startswith(STAGING_PREFIX) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)


def read_fingerprint(part: Path) -> dict[str, object]:
    """The fingerprint that a part was written under. Raises FolderError for a file that is no part of ours."""
    try:
        record = (pq.read_schema(part).metadata or {}).get(_METADATA_KEY)
        fingerprint = json.loads(record)["fingerprint"] if record is not None else None
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise FolderError(
            f"{part}: cannot be read: {str(error).splitlines()[0]}; remove the file to compute its rows again"
        ) from None
    if not isinstance(fingerprint, dict):
        raise FolderError(f"{part}: was not written by this program; choose another output.path")
    return fingerprint


def recorded_date(folder: Path) -> datetime.date | None:
    """The date under which the folder's parts were written, so that a resume after midnight keeps it; None for none."""
    parts = visible_parts(folder)
    if not parts:
        return None
    text = read_fingerprint(parts[0]).get("date")
    try:
        return datetime.date.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        raise FolderError(f"{parts[0]}: records no valid date: {text!r}") from None


def check_fingerprint(part: Path, *, expected: Mapping[str, object]) -> None:
    """Raises FolderError naming the first thing that differs from this run."""
    found = read_fingerprint(part)
    wanted = json.loads(json.dumps(expected))
    for key in [*wanted, *(key for key in found if key not in wanted)]:
        if found.get(key) != wanted.get(key):
            raise FolderError(
                f"{part.parent}: holds rows of another run: {key} was {_short(found.get(key))}, "
                f"is {_short(wanted.get(key))}; choose another output.path or remove its parts"
            )


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def read_done_rows(parts: list[Path], *, num_rows: int) -> np.ndarray:
    """bool `[num_rows]`: the input rows that the visible parts hold. Raises FolderError for a row held twice.

    All samples of a row lie in one part, so a row that is seen at all is done.
    """
    done = np.zeros(num_rows, dtype=bool)
    for part in parts:
        rows: list[np.ndarray] = []
        try:
            with pq.ParquetFile(part) as file:
                for batch in file.iter_batches(columns=["row_index"], batch_size=65536):
                    rows.append(batch.column(0).to_numpy())
        except (OSError, pa.ArrowException) as error:
            raise FolderError(
                f"{part}: cannot be read: {str(error).splitlines()[0]}; remove the file to compute its rows again"
            ) from None
        indices = np.unique(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.int64)
        if indices.size and (indices[0] < 0 or indices[-1] >= num_rows):
            raise FolderError(f"{part}: holds row {indices[-1]}, but the input has {num_rows} rows")
        twice = indices[done[indices]]
        if twice.size:
            raise FolderError(f"{part}: holds row {twice[0]}, which an earlier part holds too; remove one of them")
        done[indices] = True
    return done
