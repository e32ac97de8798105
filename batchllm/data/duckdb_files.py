"""Files as DuckDB is to read them: the rows of just these files. Left alone it takes a path apart: `*`, `?` and `[` are a pattern, under
which it may read another file, and a folder `key=value` is a column, which goes before one of that name in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal


def files_table(
    function: Literal["read_csv", "read_json", "read_parquet"], files: Sequence[Path], *, options: str = ""
) -> str:
    """The SQL of a table of the files' rows. `options`: others of the function, such as `union_by_name = true`."""
    listed = ", ".join(map(file_literal, files))
    return f"{function}([{listed}], hive_partitioning = false{', ' if options else ''}{options})"


def file_literal(file: Path) -> str:
    """The SQL literal that stands for this file alone."""
    path = "".join(f"[{character}]" if character in "*?[" else character for character in str(file))
    return "'" + path.replace("'", "''") + "'"
