"""What the files of a run folder hold, and whether one that is found there does: a damaged one must not hide what others say."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

RUNS_FOLDER = ".runs"
STEPS_FILE = "steps.parquet"
TIERS_FILE = "tiers.parquet"
SUMMARY_FILE = "summary.json"

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


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where it holds none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def summary_mistake(summary: Mapping[str, Any] | None, *, run_id: str) -> str | None:
    """What keeps the content of a summary from being the row of `runs` of the run `run_id`, which is the name of its folder."""
    if summary is None:
        return "is no JSON object"
    if summary.get("run_id") != run_id:
        return "is not of the run that its folder is named after"
    for name in ("name", "status", "started"):
        if not isinstance(summary.get(name), str):
            return f"has no {name}"
    for name, type_ in RUN_COLUMNS.items():
        value = summary.get(name)
        if value is None:
            continue
        if type_ == "JSON":
            is_right = isinstance(value, dict) and (name != "roofline" or _is_roofline(value))
        elif type_ == "TIMESTAMPTZ":
            is_right = isinstance(value, str) and _is_moment(value)
        elif type_ in ("BIGINT", "INTEGER"):
            is_right = type(value) is int and abs(value) < (2**63 if type_ == "BIGINT" else 2**31)
        else:
            is_right = isinstance(value, _KINDS[type_])
        if not is_right:
            return f"has a {name} that is no {type_}"
    return None


_KINDS = {"VARCHAR": (str,), "BOOLEAN": (bool,), "DOUBLE": (int, float)}


def _is_roofline(values: Mapping[str, Any]) -> bool:
    """Whether `roofline_text` can say it."""
    numbers = [values.get(name, math.nan) for name in ("share", "least_s")]
    phases = [values.get(name) for name in ("prefill", "decode")]
    return all(type(number) in (int, float) and 0 <= number < math.inf for number in numbers) and all(
        isinstance(phase, dict) and isinstance(phase.get("limited_by"), str) and type(phase.get("tokens")) is int
        for phase in phases
    )


def _is_moment(text: str) -> bool:
    try:
        datetime.datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def log_mistake(path: Path, columns: Mapping[str, str]) -> str | None:
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
