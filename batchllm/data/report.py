"""What a report says of one run: every figure comes from SQL over the views, so that anybody can ask for the same one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from batchllm.data.results import connect, say_nothing
from batchllm.data.run_folder import RecordedRun, recorded_runs, runs_of_job
from batchllm.errors import FolderError, JobError

NUM_BINS = 120
"""Points of a curve over time: what a page of usual width can show."""

NUM_BARS = 30
NUM_SLOWEST, NUM_FAILED, NUM_REASONS, NUM_RUNS, NUM_SHARED_RUNS = 20, 100, 20, 14, 10
_EXCERPT = 160

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Latency:
    """One of the times of a row, over the rows of a run that have it. `bars`: `low`, `high`, `num_rows`. Seconds."""

    column: str
    label: str
    num_rows: int
    p50: float | None
    p90: float | None
    p99: float | None
    most: float | None
    bars: Rows


@dataclass(frozen=True, slots=True)
class Report:
    """One run, for a page or a terminal.

    `figures`: single values by name. `curve`: bins of equal width over the steps, with `second` (start), `prompt_tokens_per_s`,
    `output_tokens_per_s`, `running`, `waiting`, `kv_bytes` (the most). `phases`: seconds and tokens of steps that only prefill, only
    decode, or do both. `tiers`: bytes held by tier over time. `runs`: this run and earlier ones of the job.
    """

    run: RecordedRun
    name: str
    figures: dict[str, Any]
    curve: Rows
    tiers: Rows
    phases: Rows
    latencies: tuple[Latency, ...]
    shared_runs: Rows
    slowest: Rows
    failed: Rows
    reasons: Rows
    runs: Rows


def choose_run(output: Path, *, run_id: str | None) -> RecordedRun:
    """The run named, else the last that took a step, else the last. Raises JobError where there is none."""
    runs = recorded_runs(output)
    if run_id is not None:
        found = [run for run in runs if run.run_id == run_id]
        if not found:
            known = ", ".join(run.run_id for run in runs[-3:]) or "none"
            raise JobError(f"{output}: records no run {run_id!r}; its last runs: {known}")
        return found[0]
    if not runs:
        raise JobError(f"{output}: records no run; run the job first, or give its --date")
    return next((run for run in reversed(runs) if run.steps is not None), runs[-1])


def build_report(output: Path, *, run_id: str | None = None, warn: Callable[[str], None] = say_nothing) -> Report:
    """Reads everything about a run; `warn` is told what is damaged and left out. Raises JobError where there is none, FolderError where it cannot be read."""
    run = choose_run(output, run_id=run_id)
    connection = connect(output, warn=warn)
    try:
        connection.execute("SET VARIABLE run = ?", [run.run_id])
        connection.execute("SET VARIABLE block_bytes = ?", [_block_bytes(run)])
        return Report(
            run=run,
            name=str(run.summary.get("name", "")),
            figures=_figures(connection) | {"reuse_ceiling": _reuse_ceiling(run)},
            curve=_curve(connection),
            tiers=_rows(connection, _TIERS),
            phases=_rows(connection, _PHASES),
            latencies=tuple(_latency(connection, column, label=label) for column, label in _LATENCIES.items()),
            shared_runs=_shared_runs(run),
            slowest=_rows(connection, _SLOWEST),
            failed=_rows(connection, _FAILED),
            reasons=_rows(connection, _REASONS),
            runs=_compared(run, output),
        )
    except duckdb.Error as error:
        raise FolderError(f"{output}: the results cannot be read: {str(error).splitlines()[0]}") from None
    finally:
        connection.close()


_THIS = "run_id = getvariable('run')"
_FIGURES = f"""
SELECT runs.* EXCLUDE (name, output),
       cached_prompt_tokens / nullif(prompt_tokens, 0) AS reuse_share,
       CAST(roofline ->> 'share' AS DOUBLE) AS roofline_share, CAST(roofline ->> 'least_s' AS DOUBLE) AS least_s,
       answered.*, stepped.*
FROM runs,
     (SELECT count(DISTINCT row_index) AS rows_answered,
             count(DISTINCT row_index) FILTER (error IS NOT NULL) AS rows_with_error,
             count(*) FILTER (finish_reason = 'length') AS samples_at_length,
             count(*) FILTER (finish_reason IN ('eos', 'stop')) AS samples_ended
      FROM completions WHERE {_THIS}) AS answered,
     (SELECT sum(seconds) AS steps_s, sum(model_seconds) AS model_s, sum(num_prefill_rows) AS prefill_rows,
             sum(num_decode_rows) AS decode_rows, max(num_running) AS most_running, max(seconds) AS longest_step_s
      FROM steps WHERE {_THIS}) AS stepped
WHERE {_THIS}
"""
_CURVE = f"""
WITH spanned AS (
    SELECT *, min(start_s) OVER () AS first_s,
           greatest((max(start_s + seconds) OVER () - min(start_s) OVER ()) / {NUM_BINS}, 1e-6) AS width_s
    FROM steps WHERE {_THIS})
SELECT first_s + width_s * least(floor((start_s - first_s) / width_s), {NUM_BINS - 1}) AS second,
       sum(num_prefill_rows) / any_value(width_s) AS prompt_tokens_per_s,
       sum(num_decode_rows) / any_value(width_s) AS output_tokens_per_s,
       avg(num_running) AS running, avg(num_waiting) AS waiting,
       max(num_used_blocks) * getvariable('block_bytes') AS kv_bytes
FROM spanned GROUP BY 1 ORDER BY 1
"""
_TIERS = f"""
SELECT tier, start_s AS second, used_bytes, capacity_bytes FROM tiers WHERE {_THIS}
QUALIFY (row_number() OVER (PARTITION BY tier ORDER BY start_s) - 1)
    % greatest(1, count(*) OVER (PARTITION BY tier) // {NUM_BINS}) = 0
ORDER BY tier, second
"""
_PHASES = f"""
SELECT CASE WHEN num_decode_rows = 0 THEN 'prefill only' WHEN num_prefill_rows = 0 THEN 'decode only' ELSE 'both' END AS phase,
       count(*) AS num_steps, sum(seconds) AS seconds, sum(num_prefill_rows) AS prompt_tokens,
       sum(num_decode_rows) AS output_tokens, sum(seconds) / sum(sum(seconds)) OVER () AS share
FROM steps WHERE {_THIS} GROUP BY 1 ORDER BY seconds DESC
"""
_SLOWEST = f"""
SELECT row_index, sample_index, CAST(id AS VARCHAR) AS id, e2e_s - queue_s AS service_s, queue_s, ttft_s, tpot_s, prompt_tokens,
       cached_tokens, completion_tokens, preemptions, left(completion, {_EXCERPT}) AS completion
FROM completions WHERE {_THIS} AND error IS NULL ORDER BY service_s DESC, row_index, sample_index LIMIT {NUM_SLOWEST}
"""
_FAILED = f"""
SELECT row_index, CAST(id AS VARCHAR) AS id, error FROM errors WHERE {_THIS} ORDER BY row_index LIMIT {NUM_FAILED}
"""
# Rows that fail alike differ in the numbers of the text.
_REASONS = f"""
SELECT regexp_replace(error, '[0-9]+', 'N', 'g') AS reason, count(DISTINCT row_index) AS num_rows, min(row_index) AS first_row
FROM errors WHERE {_THIS} GROUP BY 1 ORDER BY num_rows DESC, reason LIMIT {NUM_REASONS}
"""
_LATENCIES = {
    "ttft_s": "first scheduled to first token",
    "tpot_s": "per token after the first",
    "e2e_s": "job start to done",
    "queue_s": "job start to first scheduled",
}


def _rows(connection: duckdb.DuckDBPyConnection, sql: str) -> Rows:
    return connection.sql(sql).to_arrow_table().to_pylist()


def _figures(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    return _rows(connection, _FIGURES)[0]


def _curve(connection: duckdb.DuckDBPyConnection) -> Rows:
    return _rows(connection, _CURVE)


def _latency(connection: duckdb.DuckDBPyConnection, column: str, *, label: str) -> Latency:
    """Quantiles, and bars up to the 99th percentile times 1.2, the last of which holds all that is longer."""
    source = f"(SELECT {column} AS seconds FROM completions WHERE {_THIS} AND {column} IS NOT NULL)"
    totals = _rows(
        connection,
        "SELECT count(*) AS num_rows, quantile_cont(seconds, 0.5) AS p50, quantile_cont(seconds, 0.9) AS p90, "
        f"quantile_cont(seconds, 0.99) AS p99, max(seconds) AS most FROM {source}",
    )[0]
    most = totals["most"]
    if most is None:
        return Latency(column=column, label=label, bars=[], **totals)
    width = max(min(most, 1.2 * totals["p99"]) / NUM_BARS, 1e-9)
    width = _round_up(width)
    bars = _rows(
        connection,
        f"SELECT least(floor(seconds / {width!r}), {NUM_BARS - 1}) * {width!r} AS low, count(*) AS num_rows "
        f"FROM {source} GROUP BY 1 ORDER BY 1",
    )
    return Latency(column=column, label=label, bars=[bar | {"high": bar["low"] + width} for bar in bars], **totals)


def _round_up(width: float) -> float:
    """The next number with two digits, so that bars start at numbers a person can read."""
    unit = 10.0 ** (math.floor(math.log10(width)) - 1)
    return float(f"{math.ceil(width / unit) * unit:.2g}")


def _plans(run: RecordedRun) -> list[dict[str, Any]]:
    """The run's plans as they were recorded, one for each stage; none where another version of this program ran."""
    plans = (run.plan or {}).get("plans")
    if not isinstance(plans, list):
        return []
    # Both parts are read as mappings.
    return [
        plan
        for plan in plans
        if isinstance(plan, dict) and all(isinstance(plan.get(key) or {}, dict) for key in ("engine", "explanation"))
    ]


def _shared_runs(run: RecordedRun) -> Rows:
    """The runs of tokens that saved most, of all stages."""
    found = [node for plan in _plans(run) for node in _nodes((plan.get("explanation") or {}).get("biggest_nodes"))]
    return sorted(found, key=lambda node: -node["tokens_saved"])[:NUM_SHARED_RUNS]


def _nodes(values: object) -> Rows:
    """Those that can be shown: a file may be damaged."""
    whole = ("start", "end", "num_prompts", "tokens_saved")
    nodes = [node for node in values if isinstance(node, dict)] if isinstance(values, list) else []
    return [
        node
        for node in nodes
        if all(type(node.get(name)) is int for name in whole) and isinstance(node.get("text"), str)
    ]


def _reuse_ceiling(run: RecordedRun) -> float | None:
    """The share of the prompt tokens that the plans of all stages need not compute; None where no plan says so. Of the whole batch: a run that
    was stopped has seen some of it.
    """
    explanations = [plan.get("explanation") or {} for plan in _plans(run)]
    counts = [tuple(facts.get(name) for name in ("prompt_tokens", "unique_prompt_tokens")) for facts in explanations]
    known = [(tokens, unique) for tokens, unique in counts if isinstance(tokens, int) and isinstance(unique, int)]
    total = sum(tokens for tokens, _ in known)
    return 1 - sum(unique for _, unique in known) / total if total > 0 else None


def _block_bytes(run: RecordedRun) -> int:
    """Bytes of a block as the plan recorded it; 0 where it did not, which leaves the curve out."""
    values = [(plan.get("engine") or {}).get("block_bytes") for plan in _plans(run)]
    return values[0] if values and isinstance(values[0], int) else 0


def _compared(run: RecordedRun, output: Path) -> Rows:
    """This run and those of the same job before it, the latest first."""
    name = str(run.summary.get("name", ""))
    earlier = [other for other in runs_of_job(output, name=name) if other.run_id <= run.run_id]
    return [other.summary | {"run_id": other.run_id} for other in reversed(earlier[-NUM_RUNS:])]
