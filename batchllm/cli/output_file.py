"""The option that names a file to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class OutputFile(click.Path):
    """A path that is no folder and not empty: an unset variable of a script is wrong usage, not the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("must name a file, is empty", param, ctx)
        return super().convert(value, param, ctx)
