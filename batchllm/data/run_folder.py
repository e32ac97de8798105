"""The run folder: what each run leaves beside its completions, in `<output>/.runs/<run_id>/`.

    job.yaml       the job as it was resolved: paths absolute, dates filled in, overrides applied
    versions.json  what ran it: batchllm, Python, torch, DuckDB, PyArrow, device, kernels
    summary.json   what came of it; its `status` is running, finished, stopped or failed
    plan.json      what the plan promised, once there was one; of each stage
    rates.json     the rates that the run observed, for the next plan
    steps.parquet  one row a step
    tiers.parquet  what each tier held at moments of the run, where there is more than the device

Nothing here decides what is done: the parts alone do. The folder's name is hidden, so that a glob over an output folder does not find it.
Each file appears by a rename and is then whole. A run that was killed stays `running`.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from batchllm.data.run_files import RUNS_FOLDER, STEPS_FILE, SUMMARY_FILE, TIERS_FILE, read_json, summary_mistake
from batchllm.errors import FolderError, OutputError, write_error

_ARRAY_TYPES = {"d": pa.float64(), "l": pa.int64()}


@dataclass(slots=True)
class RunRecord:
    """What a run gathers for its folder. `steps`, `tiers`: columns of equal length by name; the others are plain JSON values."""

    plan: dict[str, Any] | None = None
    rates: dict[str, Any] | None = None
    steps: Mapping[str, Any] = field(default_factory=dict)
    tiers: Mapping[str, Any] = field(default_factory=dict)


class RunFolder:
    """Owns one run's folder. Made when the run starts; `close` says how it ended. Used under the output folder's lock."""

    def __init__(
        self, output: Path, *, run_id: str, job: Mapping[str, Any], versions: Mapping[str, Any], name: str
    ) -> None:
        """Writes what is known at the start. Raises FolderError or OutputError."""
        self.path = output / RUNS_FOLDER / run_id
        self._versions = dict(versions)
        self._summary: dict[str, Any] = {"run_id": run_id, "name": name, "status": "running", "started": _now()}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write("job.yaml", yaml.safe_dump(dict(job), sort_keys=False, allow_unicode=True).encode())
            self._write("versions.json", _json(versions))
            self._write(SUMMARY_FILE, _json(self._summary))
        except OSError as error:
            raise write_error(f"{self.path}: the run folder cannot be written", error) from None

    def note_versions(self, versions: Mapping[str, Any]) -> None:
        """What is known of the machine once there is something to run. Raises FolderError or OutputError."""
        self._versions |= versions
        try:
            self._write("versions.json", _json(self._versions))
        except OSError as error:
            raise write_error(f"{self.path}: the run folder cannot be written", error) from None

    def close(self, *, status: str, summary: Mapping[str, Any], record: RunRecord, error: str | None = None) -> None:
        """Writes how the run ended; the summary last, so that whoever sees its status finds the rest. Raises OutputError."""
        self._summary |= {**summary, "status": status, "error": error, "ended": _now()}
        try:
            self._write("versions.json", _json(self._versions | {"kernels": summary.get("kernels", "none")}))
            if record.plan is not None:
                self._write("plan.json", _json(record.plan))
            if record.rates is not None:
                self._write("rates.json", _json(record.rates))
            self._write_table(STEPS_FILE, {"step": range(_num_rows(record.steps)), **record.steps})
            self._write_table(TIERS_FILE, record.tiers)
            self._write(SUMMARY_FILE, _json(self._summary))
        except (OSError, pa.ArrowException) as failure:
            reason = getattr(failure, "strerror", None) or str(failure)
            raise OutputError(f"{self.path}: the run folder cannot be written: {reason}") from None

    def _write(self, name: str, content: bytes) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_bytes(content)
        os.rename(temporary, self.path / name)

    def _write_table(self, name: str, columns: Mapping[str, Any]) -> None:
        """A file without rows says no more than none."""
        if _num_rows(columns) == 0:
            return
        arrays = {
            key: pa.array(column, type=_ARRAY_TYPES.get(getattr(column, "typecode", "")))
            for key, column in columns.items()
        }
        temporary = self.path / f".{name}.tmp"
        pq.write_table(pa.table(arrays), temporary, compression="zstd")
        os.rename(temporary, self.path / name)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run folder as it is read: `summary` always, the others None where the run did not come that far."""

    path: Path
    summary: dict[str, Any]
    versions: dict[str, Any] | None
    plan: dict[str, Any] | None
    rates: dict[str, Any] | None

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def steps(self) -> Path | None:
        """The step log, where the run took a step."""
        path = self.path / STEPS_FILE
        return path if path.is_file() else None


def recorded_runs(output: Path) -> list[RecordedRun]:
    """The runs that an output folder records, oldest first. A folder without a summary is none; a broken file, or one of another run, is skipped."""
    folder = output / RUNS_FOLDER
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FolderError(f"{folder}: cannot be read: {error.strerror}") from None
    runs = []
    for name in names:
        path = folder / name
        summary = read_json(path / SUMMARY_FILE)
        if summary is not None and summary_mistake(summary, run_id=name) is None:
            files = {key: read_json(path / f"{key}.json") for key in ("versions", "plan", "rates")}
            runs.append(RecordedRun(path=path, summary=summary, **files))
    return runs


def runs_of_job(output: Path, *, name: str) -> list[RecordedRun]:
    """The runs of the job `name` in this output folder and in those beside it (other dates), oldest first."""
    runs = recorded_runs(output)
    try:
        beside = sorted(
            entry.path for entry in os.scandir(output.parent) if entry.is_dir() and Path(entry.path) != output
        )
    except OSError:
        # A parent that cannot be listed (or is not there yet) holds no run that could be compared.
        beside = []
    for folder in beside:
        if (Path(folder) / RUNS_FOLDER).is_dir():
            runs += recorded_runs(Path(folder))
    return sorted((run for run in runs if run.summary.get("name") == name), key=lambda run: run.run_id)


def _num_rows(columns: Mapping[str, Any]) -> int:
    return len(next(iter(columns.values()))) if columns else 0


def _json(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(dict(value), default=str, ensure_ascii=False, indent=1, allow_nan=False)
    # A command line may hold what is no Unicode: the record says which bytes.
    return text.encode("utf-8", "backslashreplace")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
