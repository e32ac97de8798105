"""The output folder: atomic parts, resume, lock, failures, samples that stay together."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchllm.data import outputs, parts
from batchllm.data.error_count import AnsweredRows, answered_rows
from batchllm.data.kept import KeptRows
from batchllm.data.lock import RunLock
from batchllm.data.outputs import OutputFolder, OutputWriter, PartLimits
from batchllm.data.results import query
from batchllm.data.schema import completion_schema
from batchllm.errors import FolderError, JobError, OutputError, RunLockedError
from batchllm.prompt import Completion

FINGERPRINT: dict[str, object] = {"model": "m", "sampling.top_p": 1.0, "date": "2026-11-29"}
CARRIED = pa.schema([pa.field("id", pa.int64()), pa.field("title", pa.string())])
SCHEMA = completion_schema(list(CARRIED), with_token_ids=True, with_logprobs=True)


def kept_rows(folder: Path, num_rows: int) -> KeptRows:
    kept = KeptRows(folder, schema=CARRIED)
    ids = np.arange(num_rows) * 10
    for start in range(0, num_rows, 100):
        stop = min(num_rows, start + 100)
        titles = [f"title {row}" for row in range(start, stop)]
        kept.append(pa.RecordBatch.from_arrays([pa.array(ids[start:stop]), pa.array(titles)], schema=CARRIED))
    return kept


@contextmanager
def open_run(
    folder: Path, num_rows: int, limits: PartLimits | None = None
) -> Iterator[tuple[OutputWriter, np.ndarray]]:
    """A run over `num_rows` rows; leaves like a run that stops: the writer's thread ends, nothing more is flushed."""
    with OutputFolder(folder) as output:
        done = output.resume(fingerprint=FINGERPRINT, num_rows=num_rows)
        kept = kept_rows(output.staging, num_rows)
        writer = OutputWriter(output, schema=SCHEMA, kept=kept, model="m", limits=limits)
        try:
            yield writer, done
        finally:
            end_thread(writer)
            kept.close()


def end_thread(writer: OutputWriter) -> None:
    with writer._changed:
        writer._closing = True
        writer._changed.notify_all()
    writer._thread.join(timeout=20)
    assert not writer._thread.is_alive()


def answer(row: int, sample: int = 0) -> Completion:
    return Completion(row, sample, text=f"answer {row}.{sample}", token_ids=[row, sample], finish_reason="eos")


def rows_of(folder: Path) -> list[tuple[Any, ...]]:
    pattern = str(folder / "*.parquet")
    if not list(folder.glob("*.parquet")):
        return []
    return duckdb.sql(
        f"select row_index, sample_index, id, title, completion, error from read_parquet('{pattern}') order by 1, 2"
    ).fetchall()


def expected(row: int, sample: int = 0) -> tuple[Any, ...]:
    return (row, sample, row * 10, f"title {row}", f"answer {row}.{sample}", None)


def test_each_row_carries_its_own_cells_whatever_the_order_of_completion(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(1200)
    with open_run(tmp_path, 1200, PartLimits(max_rows=500)) as (writer, done):
        assert not done.any()
        for row in order:
            writer.add(answer(int(row)))
        writer.close()
    assert rows_of(tmp_path) == [expected(row) for row in range(1200)]
    assert not [name for name in os.listdir(tmp_path) if name.startswith((".part", ".staging"))]


def test_rows_inside_a_part_are_sorted_and_every_part_has_the_same_schema(tmp_path: Path) -> None:
    with open_run(tmp_path, 40) as (writer, _):
        for row in (7, 3, 5):
            writer.add(answer(row))
        writer.flush()
        writer.add_error(39, "row 39: column 'text' is null")
        writer.close()
    first, second = (pq.read_table(path) for path in sorted(tmp_path.glob("*.parquet")))
    assert first.column("row_index").to_pylist() == [3, 5, 7]
    assert first.schema == second.schema == SCHEMA
    assert second.column("error").to_pylist() == ["row 39: column 'text' is null"]
    assert second.column("finish_reason").to_pylist() == ["error"]
    assert second.column("completion").to_pylist() == [None]


def test_samples_of_a_row_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    with open_run(tmp_path, 3) as (writer, _):
        writer.add(answer(0, 1), num_samples=2)
        writer.add(answer(1, 0), num_samples=2)
        writer.add(answer(0, 0), num_samples=2)
        writer.close()
    assert rows_of(tmp_path) == [expected(0, 0), expected(0, 1)]
    with open_run(tmp_path, 3) as (_, done):
        assert done.tolist() == [True, False, False]


def test_a_writer_counts_the_input_rows_that_its_parts_hold_as_these_do(tmp_path: Path) -> None:
    with open_run(tmp_path, 10, PartLimits(max_rows=3)) as (writer, _):
        for row in range(4):
            writer.add(answer(row, 0), num_samples=2)
            bad = Completion(row, 1, error="row says no") if row == 2 else answer(row, 1)
            writer.add(bad, num_samples=2)
        for row in range(4, 8):
            writer.add(answer(row))
        writer.add(answer(8, 0), num_samples=2)
        writer.add_error(9, "row 9: column 'text' is null")
        writer.close()
        counted = answered_rows(tmp_path, below=10)
        assert (writer.rows_completed, writer.rows_failed) == (counted.completed, counted.failed) == (7, 2)
    assert answered_rows(tmp_path, below=2) == AnsweredRows(completed=2)


def test_logprobs_are_finite_or_null(tmp_path: Path) -> None:
    completion = answer(0)
    completion.logprobs = [(5, -0.5, ((5, -0.5), (6, float("-inf")), (7, float("nan"))))]
    with open_run(tmp_path, 1) as (writer, _):
        writer.add(completion)
        writer.close()
    table = pq.read_table(next(tmp_path.glob("*.parquet")))
    assert table.column("logprobs").to_pylist() == [
        [
            {
                "token_id": 5,
                "logprob": -0.5,
                "top": [
                    {"token_id": 5, "logprob": -0.5},
                    {"token_id": 6, "logprob": None},
                    {"token_id": 7, "logprob": None},
                ],
            }
        ]
    ]


def test_the_first_rows_become_visible_without_a_flush(tmp_path: Path) -> None:
    with open_run(tmp_path, 2, PartLimits(first_interval_s=0.05)) as (writer, _):
        writer.add(answer(0))
        waiting = threading.Event()
        for _ in range(100):
            if rows_of(tmp_path):
                break
            waiting.wait(0.05)
        assert rows_of(tmp_path) == [expected(0)]


def test_a_folder_of_another_run_is_refused_with_the_difference_named(tmp_path: Path) -> None:
    with open_run(tmp_path, 1) as (writer, _):
        writer.add(answer(0))
        writer.close()
    with OutputFolder(tmp_path) as output, pytest.raises(FolderError, match="sampling.top_p was 1.0, is 0.5"):
        output.resume(fingerprint={**FINGERPRINT, "sampling.top_p": 0.5}, num_rows=1)
    with OutputFolder(tmp_path) as output, pytest.raises(FolderError, match="holds row 0, but the input has 0 rows"):
        output.resume(fingerprint=FINGERPRINT, num_rows=0)


def test_foreign_and_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other.parquet").write_bytes(b"PAR1")
    with pytest.raises(FolderError, match="other.parquet, which is no part"):
        OutputFolder(tmp_path)
    (tmp_path / "other.parquet").unlink()
    part = tmp_path / parts.part_name(0, run_id="x")
    part.write_bytes(b"PAR1 not really")
    with OutputFolder(tmp_path) as output, pytest.raises(FolderError, match="part-000000-x.parquet: cannot be read"):
        output.resume(fingerprint=FINGERPRINT, num_rows=1)
    part.unlink()
    pq.write_table(pa.table({"row_index": [0]}), part)
    with OutputFolder(tmp_path) as output, pytest.raises(FolderError, match="not written by this program"):
        output.resume(fingerprint=FINGERPRINT, num_rows=1)


def test_the_date_of_a_folder_is_that_of_its_parts(tmp_path: Path) -> None:
    assert parts.recorded_date(tmp_path / "none") is None
    with open_run(tmp_path, 1) as (writer, _):
        writer.add(answer(0))
        writer.close()
    assert str(parts.recorded_date(tmp_path)) == "2026-11-29"


def test_a_row_that_two_parts_hold_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path, 1) as (writer, _):
        writer.add(answer(0))
        writer.close()
    part = next(tmp_path.glob("*.parquet"))
    (tmp_path / parts.part_name(1, run_id="copy")).write_bytes(part.read_bytes())
    with OutputFolder(tmp_path) as output, pytest.raises(FolderError, match="holds row 0, which an earlier part holds"):
        output.resume(fingerprint=FINGERPRINT, num_rows=1)


class Crash(BaseException):
    """The process ends here: no clean-up runs after it."""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), num_rows=st.integers(1, 30))
def test_after_crashes_at_any_step_each_row_is_written_once_and_parts_are_readable(
    data: st.DataObject, num_rows: int
) -> None:
    num_samples = [1 + row % 3 for row in range(num_rows)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(data.draw(st.integers(1, 3), label="crashes")):
            crash_at = data.draw(st.integers(0, 12), label="crash at call")
            with pytest.MonkeyPatch.context() as patch:
                fail_at(patch, crash_at, Crash())
                try:
                    run_rest(folder, num_rows, num_samples, data)
                except Crash:
                    pass
            assert_rows_are_whole(folder, num_samples)
        run_rest(folder, num_rows, num_samples, data)
        assert rows_of(folder) == [expected(r, s) for r in range(num_rows) for s in range(num_samples[r])]


def run_rest(folder: Path, num_rows: int, num_samples: list[int], data: st.DataObject) -> None:
    limits = PartLimits(max_rows=data.draw(st.integers(1, 20), label="rows per part"))
    with open_run(folder, num_rows, limits) as (writer, done):
        todo = [(int(r), s) for r in np.flatnonzero(~done) for s in range(num_samples[r])]
        for row, sample in data.draw(st.permutations(todo), label="order"):
            writer.add(answer(row, sample), num_samples=num_samples[row])
        writer.close()


def fail_at(patch: pytest.MonkeyPatch, position: int, failure: BaseException) -> list[str]:
    """The `position`-th file operation of the parts raises, before or after it was done."""
    calls: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            calls.append(name)
            if len(calls) - 1 == position:
                if position % 2:
                    real(*args, **named)
                raise failure
            return real(*args, **named)

        return call

    for module, name in ((parts.pq, "write_table"), (os, "fsync"), (os, "rename")):
        patch.setattr(module, name, counted(name, getattr(module, name)))
    return calls


def assert_rows_are_whole(folder: Path, num_samples: list[int]) -> None:
    rows = rows_of(folder)
    seen = {row[0] for row in rows}
    assert rows == [expected(r, s) for r in sorted(seen) for s in range(num_samples[r])]


@pytest.mark.parametrize("position", range(4))
def test_a_write_error_is_one_line_leaves_no_torn_file_and_resume_works(tmp_path: Path, position: int) -> None:
    with pytest.MonkeyPatch.context() as patch, open_run(tmp_path, 5) as (writer, _):
        fail_at(patch, position, OSError(28, "No space left on device"))
        for row in range(5):
            writer.add(answer(row))
        with pytest.raises(OutputError, match="No space left on device") as caught:
            writer.close()
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.glob(".part*"))
    run = rows_of(tmp_path)
    assert run in ([], [expected(row) for row in range(5)])
    with open_run(tmp_path, 5) as (writer, done):
        for row in np.flatnonzero(~done):
            writer.add(answer(int(row)))
        writer.close()
    assert rows_of(tmp_path) == [expected(row) for row in range(5)]


def test_a_failure_on_the_thread_is_raised_by_the_next_add(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, open_run(tmp_path, 3, PartLimits(max_rows=1)) as (writer, _):
        fail_at(patch, 0, OSError(5, "Input/output error"))
        with pytest.raises(OutputError, match="Input/output error"):
            for _ in range(1000):
                writer.add(answer(0))
                threading.Event().wait(0.01)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_outputs import answer, open_run, PartLimits
import numpy as np
with open_run(Path(sys.argv[1]), 3000, PartLimits(max_rows=40)) as (writer, done):
    for row in np.random.default_rng(1).permutation(np.flatnonzero(~done)):
        writer.add(answer(int(row)))
        if row % 20 == 0:
            writer.flush()
            print(row, flush=True)
            sys.stdin.readline()
    writer.close()
"""


def test_a_run_killed_at_any_moment_loses_and_repeats_no_row_and_is_always_readable(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    for num_steps, delay_s in ((1, 0.0), (30, 0.004), (50, 0.02)):
        with run_child(KILLED, str(tmp_path), here) as child:
            assert child.stdin is not None and child.stdout is not None
            for _ in range(num_steps):
                assert child.stdout.readline()
                rows = rows_of(tmp_path)
                assert rows == [expected(row[0]) for row in rows]
                child.stdin.write("\n")
                child.stdin.flush()
            threading.Event().wait(delay_s)
            child.kill()
        assert 0 < len(rows_of(tmp_path)) < 3000
    with run_child(KILLED, str(tmp_path), here) as child:
        child.communicate("\n" * 200, timeout=60)
        assert child.returncode == 0
    assert rows_of(tmp_path) == [expected(row) for row in range(3000)]
    assert not [name for name in os.listdir(tmp_path) if name.startswith((".part", ".staging"))]


FULL_DISK = """
import os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_outputs import answer, open_run
from batchllm.errors import OutputError
with open_run(Path(sys.argv[1]), 4) as (writer, done):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for row in range(4):
        completion = answer(row)
        completion.text = os.urandom(100_000).hex()
        writer.add(completion)
    try:
        writer.close()
    except OutputError as error:
        print(error)
"""


def test_a_file_that_the_system_refuses_to_grow_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with run_child(FULL_DISK, str(tmp_path), str(Path(__file__).parent)) as child:
        output, _ = child.communicate(timeout=60)
    assert "completions cannot be written: File too large" in output and len(output.splitlines()) == 1
    assert child.returncode == 0 and not list(tmp_path.glob("*.parquet")) and not list(tmp_path.glob(".part*"))


CHILD = """
import sys
from pathlib import Path
from batchllm.data.outputs import OutputFolder
from batchllm.errors import BatchLLMError
try:
    with OutputFolder(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
except BatchLLMError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


def run_child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(outputs.__file__).parents[2],
    )


def test_a_second_run_names_the_holder_and_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    with run_child(CHILD, str(tmp_path)) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(RunLockedError, match=f"process {first.pid} on ") as caught:
            OutputFolder(tmp_path)
        assert caught.value.exit_code == 4
        first.kill()
    with OutputFolder(tmp_path) as output:
        assert [entry.name for entry in tmp_path.glob(".staging-*")] == [output.staging.name]


def test_views_are_ordered_and_have_their_columns_with_no_part_at_all(tmp_path: Path) -> None:
    assert query("select count(*) as n from completions", tmp_path).to_pylist() == [{"n": 0}]
    with pytest.raises(JobError, match="query: .*nothing"):
        query("select nothing from completions", tmp_path)
    with pytest.raises(JobError, match="one SQL statement"):
        query("select 1; select 2", tmp_path)
    empty = query("select * from errors", tmp_path).schema.names
    assert empty == [name for name in SCHEMA.names if name not in ("title", "token_ids", "logprobs")]
    with open_run(tmp_path, 12, PartLimits(max_rows=3)) as (writer, _):
        for row in (10, 2, 11, 1, 9, 0):
            writer.add(answer(row))
        writer.add_error(4, "bad")
        writer.close()
    assert query("select row_index from completions", tmp_path)["row_index"].to_pylist() == [0, 1, 2, 4, 9, 10, 11]
    assert query("select row_index, error from errors", tmp_path).to_pylist() == [{"row_index": 4, "error": "bad"}]


def test_a_run_is_noticed_where_its_lock_file_was_removed(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    (tmp_path / ".lock").unlink()
    with pytest.raises(RunLockedError, match="another run is writing here"):
        RunLock(tmp_path)
    first.release()
    RunLock(tmp_path).release()


def test_a_lock_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(FolderError, match=r"\.lock: cannot be locked: it is no file"):
        RunLock(tmp_path)


def test_names_of_runs_sort_as_the_runs_begin_within_a_second_too() -> None:
    first = datetime.datetime(2026, 12, 1, 3, 59, 59, 999_950, tzinfo=datetime.UTC)
    names = [outputs.new_run_id(first + datetime.timedelta(microseconds=20 * number)) for number in range(2000)]
    assert names == sorted(set(names))
    assert names[0].startswith("20261201T035959Z-fff") and names[-1].startswith("20261201T040000Z-0")
