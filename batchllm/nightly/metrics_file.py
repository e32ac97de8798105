"""A run as Prometheus metrics, in the text format that the node exporter's textfile collector reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from batchllm import __version__
from batchllm.data.replaced_file import replace_file
from batchllm.nightly.outcome import Outcome


def write_metrics(outcome: Outcome, path: Path) -> None:
    """Replaces the file as a whole, so that a collector never reads half of it. Raises OutputError."""
    replace_file(path, [metrics_text(outcome).encode("utf-8", "replace")])


def metrics_text(outcome: Outcome) -> str:
    """All are gauges of the job's last run, labelled with its name. A run that could not start has no more than its end."""
    return "".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    job = {"job": outcome.job.name}
    wall_s = (outcome.ended_at - outcome.started_at).total_seconds()
    yield from _metric("exit_code", "Exit code of the last run.", [(job, outcome.exit_code)])
    yield from _metric("start_timestamp_seconds", "When the last run started.", [(job, outcome.started_at.timestamp())])
    yield from _metric("end_timestamp_seconds", "When the last run ended.", [(job, outcome.ended_at.timestamp())])
    yield from _metric("duration_seconds", "How long the last run took.", [(job, max(wall_s, 0.0))])
    summary = outcome.summary
    if summary is None:
        return
    about = {
        "run_id": summary.run_id,
        "date": outcome.job.date.isoformat(),
        "model": summary.model,
        "device": summary.device,
        "dtype": summary.dtype,
        "kernels": summary.kernels,
        "version": __version__,
    }
    answered = summary.rows_completed + summary.rows_failed
    states = {
        "completed": summary.rows_completed,
        "failed": summary.rows_failed,
        "unanswered": max(summary.num_rows - answered, 0),
    }
    tokens = {
        "prompt": summary.prompt_tokens,
        "prompt_computed": summary.computed_prompt_tokens,
        "prompt_shared": summary.cached_prompt_tokens,
        "completion": summary.completion_tokens,
        "recomputed": summary.recomputed_tokens,
    }
    yield from _metric("info", "What the last run was made with.", [({**job, **about}, 1)])
    yield from _metric(
        "rows",
        "Input rows by what came of them, those of earlier runs of the same output among them.",
        [({**job, "state": state}, count) for state, count in states.items()],
    )
    yield from _metric("rows_before", "Input rows that earlier runs had answered.", [(job, summary.rows_before)])
    yield from _metric(
        "tokens", "Tokens of the last run.", [({**job, "kind": kind}, count) for kind, count in tokens.items()]
    )
    yield from _metric("load_seconds", "How long the last run took for its model and memory.", [(job, summary.load_s)])
    yield from _metric(
        "output_tokens_per_second", "Tokens generated per second of steps.", [(job, summary.output_tokens_per_s)]
    )
    yield from _metric("preemptions", "Sequences that were preempted.", [(job, summary.preemptions)])
    yield from _metric("kv_peak_ratio", "Largest share of the KV blocks in use.", [(job, summary.kv_peak_share)])
    yield from _metric(
        "kv_waste_ratio", "Share of the allocated KV slots never filled.", [(job, summary.kv_waste_share)]
    )
    if summary.roofline is not None:
        yield from _metric(
            "roofline_ratio",
            "Share of what the machine can do that the steps reached.",
            [(job, summary.roofline.share)],
        )


def _metric(name: str, help_text: str, samples: list[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield f"# HELP batchllm_run_{name} {help_text}\n# TYPE batchllm_run_{name} gauge\n"
    for labels, value in samples:
        listed = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"batchllm_run_{name}{{{listed}}} {value!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
