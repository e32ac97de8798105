"""The views `runs`, `steps` and `tiers`: plain SQL over the run folders of an output folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from batchllm.data.duckdb_files import files_table
from batchllm.data.run_files import (
    RUN_COLUMNS,
    RUNS_FOLDER,
    STEP_COLUMNS,
    STEPS_FILE,
    SUMMARY_FILE,
    TIER_COLUMNS,
    TIERS_FILE,
    log_mistake,
    read_json,
    summary_mistake,
)


def run_view_statements(folder: Path, *, warn: Callable[[str], None]) -> list[str]:
    """The SQL that defines the three views over the run folders that are there now.

    One file that is damaged must not hide all others: it is left out, and `warn` is told.
    """

    def whole(name: str, mistake: Callable[[Path], str | None]) -> list[Path]:
        found = []
        for path in sorted((folder / RUNS_FOLDER).glob(f"*/{name}")):
            reason = mistake(path)
            if reason is None:
                found.append(path)
            else:
                warn(f"{path}: left out, for it {reason}")
        return found

    summaries = whole(SUMMARY_FILE, lambda path: summary_mistake(read_json(path), run_id=path.parent.name))
    steps = whole(STEPS_FILE, lambda path: log_mistake(path, STEP_COLUMNS))
    tiers = whole(TIERS_FILE, lambda path: log_mistake(path, TIER_COLUMNS))
    columns = ", ".join(f"{name}: '{type_}'" for name, type_ in RUN_COLUMNS.items())
    options = f"columns = {{{columns}}}, format = 'unstructured'"
    runs = f"SELECT * FROM {files_table('read_json', summaries, options=options)}"
    return [
        f"CREATE OR REPLACE VIEW runs AS {runs if summaries else empty_select(RUN_COLUMNS)} ORDER BY run_id",
        f"CREATE OR REPLACE VIEW steps AS {_logged(steps, STEP_COLUMNS, order='run_id, step')}",
        f"CREATE OR REPLACE VIEW tiers AS {_logged(tiers, TIER_COLUMNS, order='run_id, start_s, tier')}",
    ]


def _logged(files: list[Path], columns: Mapping[str, str], *, order: str) -> str:
    if not files:
        return empty_select(columns)
    # The run's id is the name of its folder; a column that an older run did not log is NULL.
    return (
        "SELECT parse_path(filename)[-2] AS run_id, * EXCLUDE (filename) "
        f"FROM {files_table('read_parquet', files, options='filename = true, union_by_name = true')} ORDER BY {order}"
    )


def empty_select(columns: Mapping[str, str]) -> str:
    """No rows, with these columns and types."""
    return f"SELECT {', '.join(f'CAST(NULL AS {type_}) AS {name}' for name, type_ in columns.items())} WHERE false"
