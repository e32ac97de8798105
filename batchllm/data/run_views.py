"""The views `runs`, `steps` and `tiers`: plain SQL over the run folders of an output folder."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm.data.run_folder import RUNS_FOLDER, STEPS_FILE, SUMMARY_FILE, TIERS_FILE, read_json

RUN_COLUMNS = {
    "run_id": "VARCHAR",
    "name": "VARCHAR",
    "status": "VARCHAR",
    "started": "TIMESTAMPTZ",
    "ended": "TIMESTAMPTZ",
    "error": "VARCHAR",
    "exit_code": "INTEGER",
    "finished": "BOOLEAN",
    "output": "VARCHAR",
    "num_rows": "BIGINT",
    "rows_before": "BIGINT",
    "rows_completed": "BIGINT",
    "rows_failed": "BIGINT",
    "wall_s": "DOUBLE",
    "load_s": "DOUBLE",
    "prompt_tokens": "BIGINT",
    "unique_prompt_tokens": "BIGINT",
    "computed_prompt_tokens": "BIGINT",
    "cached_prompt_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "output_tokens_per_s": "DOUBLE",
    "num_steps": "BIGINT",
    "preemptions": "BIGINT",
    "recomputed_tokens": "BIGINT",
    "drafted_tokens": "BIGINT",
    "accepted_tokens": "BIGINT",
    "kv_peak_share": "DOUBLE",
    "kv_waste_share": "DOUBLE",
    "device": "VARCHAR",
    "dtype": "VARCHAR",
    "kernels": "VARCHAR",
    "model": "VARCHAR",
    "tiers": "JSON",
    "roofline": "JSON",
    "too_many_errors": "VARCHAR",
}
"""Columns of `runs`: the keys of summary.json. A run that failed early, or still runs, has NULL where it has no figure."""

STEP_COLUMNS = {
    "run_id": "VARCHAR",
    "step": "BIGINT",
    "start_s": "DOUBLE",
    "seconds": "DOUBLE",
    "model_seconds": "DOUBLE",
    "num_decode_rows": "BIGINT",
    "num_prefill_rows": "BIGINT",
    "num_running": "BIGINT",
    "num_waiting": "BIGINT",
    "num_used_blocks": "BIGINT",
    "num_kv_tokens_read": "BIGINT",
    "num_kv_tokens_spared": "BIGINT",
    "num_preempted": "BIGINT",
    "num_drafted": "BIGINT",
    "num_accepted": "BIGINT",
}
"""Columns of `steps`, as in the engine's step log; seconds from the start of the run."""

TIER_COLUMNS = {
    "run_id": "VARCHAR",
    "start_s": "DOUBLE",
    "tier": "VARCHAR",
    "used_bytes": "BIGINT",
    "capacity_bytes": "BIGINT",
    "read_bytes": "BIGINT",
    "written_bytes": "BIGINT",
}
"""Columns of `tiers`: what each tier held at moments of a run, and what it had moved until then."""


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

    summaries = whole(SUMMARY_FILE, lambda path: summary_mistake(read_json(path)))
    steps = whole(STEPS_FILE, lambda path: _log_mistake(path, STEP_COLUMNS))
    tiers = whole(TIERS_FILE, lambda path: _log_mistake(path, TIER_COLUMNS))
    columns = ", ".join(f"{name}: '{type_}'" for name, type_ in RUN_COLUMNS.items())
    runs = f"SELECT * FROM read_json({files_text(summaries)}, columns = {{{columns}}}, format = 'unstructured')"
    return [
        f"CREATE OR REPLACE VIEW runs AS {runs if summaries else empty_select(RUN_COLUMNS)} ORDER BY run_id",
        f"CREATE OR REPLACE VIEW steps AS {_logged(steps, STEP_COLUMNS, order='run_id, step')}",
        f"CREATE OR REPLACE VIEW tiers AS {_logged(tiers, TIER_COLUMNS, order='run_id, start_s, tier')}",
    ]


def summary_mistake(summary: Mapping[str, Any] | None) -> str | None:
    """What keeps the content of a summary from being a row of `runs`."""
    if summary is None:
        return "is no JSON object"
    for name, type_ in RUN_COLUMNS.items():
        value = summary.get(name)
        if value is None or type_ == "JSON":
            continue
        if type_ == "TIMESTAMPTZ":
            is_right = isinstance(value, str) and _is_moment(value)
        elif type_ in ("BIGINT", "INTEGER"):
            is_right = type(value) is int and abs(value) < (2**63 if type_ == "BIGINT" else 2**31)
        else:
            is_right = isinstance(value, _KINDS[type_])
        if not is_right:
            return f"has a {name} that is no {type_}"
    return None


_KINDS = {"VARCHAR": (str,), "BOOLEAN": (bool,), "DOUBLE": (int, float)}


def _is_moment(text: str) -> bool:
    try:
        datetime.datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _log_mistake(path: Path, columns: Mapping[str, str]) -> str | None:
    """What keeps a log from being rows of its view: read by its footer alone."""
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException):
        return "is no Parquet file"
    for name in schema.names:
        type_ = schema.field(name).type
        is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
        if name in columns and is_text != (columns[name] == "VARCHAR"):
            return f"has a {name} that is no {columns[name]}"
    return None


def _logged(files: list[Path], columns: Mapping[str, str], *, order: str) -> str:
    if not files:
        return empty_select(columns)
    # The run's id is the name of its folder; a column that an older run did not log is NULL.
    return (
        "SELECT parse_path(filename)[-2] AS run_id, * EXCLUDE (filename) "
        f"FROM read_parquet({files_text(files)}, filename = true, union_by_name = true) ORDER BY {order}"
    )


def files_text(files: list[Path]) -> str:
    """A list of files as an SQL literal."""
    return f"[{', '.join(quoted(str(file)) for file in files)}]"


def empty_select(columns: Mapping[str, str]) -> str:
    """No rows, with these columns and types."""
    return f"SELECT {', '.join(f'CAST(NULL AS {type_}) AS {name}' for name, type_ in columns.items())} WHERE false"


def quoted(text: str) -> str:
    """An SQL string literal."""
    return "'" + text.replace("'", "''") + "'"
