"""The views `runs`, `steps` and `tiers`: plain SQL over the run folders of an output folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchllm.data.run_folder import RUNS_FOLDER, STEPS_FILE, SUMMARY_FILE, TIERS_FILE

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


def run_view_statements(folder: Path) -> list[str]:
    """The SQL that defines the three views over the run folders that are there now."""
    summaries, steps, tiers = (
        sorted((folder / RUNS_FOLDER).glob(f"*/{name}")) for name in (SUMMARY_FILE, STEPS_FILE, TIERS_FILE)
    )
    columns = ", ".join(f"{name}: '{type_}'" for name, type_ in RUN_COLUMNS.items())
    runs = f"SELECT * FROM read_json({files_text(summaries)}, columns = {{{columns}}}, format = 'unstructured')"
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
