"""What came of one run, as the summary file and the commands after it say it: also of a run that could not start."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path

from batchllm.data.replaced_file import replace_file
from batchllm.job import Job
from batchllm.run import RunSummary, summary_values


@dataclass(frozen=True, slots=True)
class Outcome:
    """`summary` is None where the run ended with `error`. Moments are aware."""

    job: Job
    job_file: Path
    exit_code: int
    error: str | None
    started_at: datetime.datetime
    ended_at: datetime.datetime
    summary: RunSummary | None


def outcome_values(outcome: Outcome) -> dict[str, object]:
    """Plain JSON values: name, date, exit code and error of every run, and all of `RunSummary` where there is one."""
    values: dict[str, object] = {
        "name": outcome.job.name,
        "job_file": str(outcome.job_file),
        "date": outcome.job.date.isoformat(),
        "output": outcome.job.output.path,
        "exit_code": outcome.exit_code,
        "error": outcome.error,
        "started_at": outcome.started_at.isoformat(timespec="milliseconds"),
        "ended_at": outcome.ended_at.isoformat(timespec="milliseconds"),
    }
    if outcome.summary is not None:
        values = {**summary_values(outcome.summary), **values}
    return values


def write_summary(outcome: Outcome, path: Path) -> None:
    """The values as one JSON object, replacing the file as a whole. Raises OutputError."""
    text = json.dumps(outcome_values(outcome), indent=2, ensure_ascii=False)
    replace_file(path, [text.encode("utf-8", "replace"), b"\n"])
