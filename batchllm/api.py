"""`batchllm` in Python: `run` and `plan` over rows that are in memory, or over what a job names itself."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import pyarrow as pa

from batchllm.data.results import connect, query
from batchllm.data.spool import spool_batches
from batchllm.errors import InputError, JobError, OutputError
from batchllm.job import SOURCES, Job
from batchllm.planning import JobPlan, plan_job
from batchllm.planning_stages import StagedPlan
from batchllm.run_job import RunOptions, run_job
from batchllm.run_progress import Observer
from batchllm.run_summary import RunSummary


class ArrowStream(Protocol):
    """A table that speaks the Arrow C stream interface: of pyarrow, Polars, pandas 2.2 or newer, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Rows: TypeAlias = ArrowStream | pa.RecordBatch | str | Path


class _TemporaryFolder:
    """A folder that is removed when the last reference to this goes, or at exit."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="batchllm-run-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run left. `folder` holds its Parquet parts; a temporary one is removed with the last reference to the result.

    One row per input row and sample, by ascending `row_index`, under the columns that the README lists; times in
    seconds. `completion` is NULL where `error` says why.
    """

    summary: RunSummary
    folder: Path
    _keeper: _TemporaryFolder | None = field(default=None, repr=False)

    def to_table(self) -> pa.Table:
        """All rows as one Arrow table. Raises FolderError where a part cannot be read."""
        return query("SELECT * FROM completions", self.folder)

    def iter_batches(self, *, max_rows: int = 16_384) -> Iterator[pa.RecordBatch]:
        """The rows in batches of at most `max_rows`, so that memory stays bounded. Raises FolderError."""
        connection = connect(self.folder)
        try:
            yield from connection.sql("SELECT * FROM completions").to_arrow_reader(max_rows)
        finally:
            connection.close()


def run(job: Job, rows: Rows | None = None, *, limit: int | None = None, observer: Observer | None = None) -> Result:
    """Runs `job` over `rows` and returns when every row is answered.

    `rows`: an Arrow table, batch or reader, a pandas or Polars frame, or the path of a file, folder or glob; None takes
    the input that the job names. `limit` takes the first rows. Completions go to the job's `output.path`, where a run
    that was stopped is finished by the same call; without a path, to a temporary folder. `observer` is told how far it is.

    Raises a WrongInputError (JobError, InputError, ModelError, FolderError) where the job cannot run, OutputError where the disk is
    full, ModelFetchError where the network is down, RunLockedError where another run is at it. A row that cannot be run raises nothing: it is a row with `error`.
    """
    with tempfile.TemporaryDirectory(prefix="batchllm-rows-") as name:
        _check_limit(limit)
        job, keeper = _with_places(job, rows, folder=Path(name))
        summary = run_job(job, options=RunOptions(limit=limit), observer=observer)
    return Result(summary=summary, folder=Path(job.output.path), _keeper=keeper)


def plan(job: Job, rows: Rows | None = None, *, limit: int | None = None) -> JobPlan | StagedPlan:
    """Explains `job` over `rows` (as in `run`) without running it: shared prefixes, KV memory, predicted times, advice.

    `.to_text()` prints it, `.to_json()` gives plain values, `.explanation` has the figures: tokens, bytes, seconds; of a job with
    stages `.stages` has a plan for each. Raises as `run` does.
    """
    with tempfile.TemporaryDirectory(prefix="batchllm-rows-") as name:
        _check_limit(limit)
        job, _ = _with_places(job, rows, folder=Path(name))
        return plan_job(job, limit=limit)


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise JobError(f"limit: must be at least 1, not {limit}")


def _with_places(job: Job, rows: Rows | None, *, folder: Path) -> tuple[Job, _TemporaryFolder | None]:
    """The job with an input and an output; rows from memory are written to `folder`."""
    names_input = any(getattr(job.input, key) is not None for key in SOURCES)
    if rows is None and not names_input:
        raise JobError("the job has no rows: give run(job, rows=…), or the job an input.path or input.sql")
    if rows is not None and names_input:
        raise JobError("rows are given, and the job names an input of its own; leave one of them out")
    if isinstance(rows, str | Path):
        section = job.input.model_copy(update={"path": str(Path(rows).expanduser())})
        job = job.model_copy(update={"input": section})
    elif rows is not None:
        job = job.with_rows(_spooled(rows, folder=folder))
    if job.output.path:
        return job, None
    keeper = _TemporaryFolder()
    output = job.output.model_copy(update={"path": str(keeper.path / "output")})
    return job.model_copy(update={"output": output}), keeper


def _spooled(rows: ArrowStream | pa.RecordBatch, *, folder: Path) -> Path:
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if not hasattr(rows, "__arrow_c_stream__"):
        raise JobError(
            f"rows: {type(rows).__name__} is no table; give an Arrow table or reader, a pandas (2.2 or newer) or Polars frame, or a path"
        )
    try:
        return spool_batches(pa.RecordBatchReader.from_stream(rows), spool_folder=folder)
    except OSError as error:
        raise OutputError(f"rows: cannot be staged: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise InputError(f"rows: cannot be staged: {str(error).splitlines()[0]}") from None
