"""Arguments that name files and folders: what no path can be is wrong usage, found before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from batchllm.data.places import BATCH_ERRORS_NAME, BATCH_OUTPUT_NAME, place_mistake

_MOST_SHOWN = 60
"""Characters of a wrong path that a message repeats."""

_DEVICES = (Path("/dev"), Path("/dev/fd"))


class GivenPath(click.Path):
    """A path to read. An empty one, as of an unset variable in a script, is not the current folder."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, file_okay=file_okay, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        mistake = place_mistake(text)
        if mistake is not None:
            shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
            self.fail(f"{ascii(shown)} {mistake}", param, ctx)
        return super().convert(value, param, ctx)


class GivenFolder(GivenPath):
    """A folder that is there."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)
        self.exists = True


class OutputFile(GivenPath):
    """A file to write."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)


class ReplacedFile(OutputFile):
    """A file that appears as a whole, by a rename: no device, which would be gone."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if path.absolute().parent in _DEVICES or (path.exists() and not path.is_file()):
            self.fail(f"'{path}' is a device or a pipe, and a file is wanted", param, ctx)
        return path


def check_beside_parts(files: Mapping[str, Path | None], *, folder: Path) -> None:
    """Raises UsageError where a file would stand among those that runs write to the output folder: it would replace one of them, or be
    taken for one by the next run. Under another name it may lie there.
    """
    root = os.path.realpath(folder)
    for name, path in files.items():
        if path is None:
            continue
        place = os.path.join(os.path.realpath(path.parent), path.name)
        inside = os.path.relpath(place, root)
        first, *below = inside.split(os.sep)
        is_runs_own = first.startswith(".") or first in (BATCH_OUTPUT_NAME, BATCH_ERRORS_NAME)
        if first != os.pardir and (is_runs_own or (not below and inside.endswith(".parquet"))):
            raise click.UsageError(
                f"{name} {path} would stand among the files of runs in output.path; name a file elsewhere"
            )


def check_apart(files: Mapping[str, Path | None]) -> None:
    """Raises UsageError where two of the files are one, by what they are called: one would be written over the other."""
    names: dict[str, str] = {}
    for name, path in files.items():
        if path is not None:
            other = names.setdefault(os.path.realpath(path), name)
            if other != name:
                raise click.UsageError(f"{name} {path} is {other} too; give it a file of its own")
