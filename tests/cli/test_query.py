"""`batchllm query`: the views, the formats, the prompt, and wrong usage."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
DATE = ("--date", "2026-11-29")
REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_view_answers_with_what_the_run_left(finished_job: Path, run_cli: Cli) -> None:
    sql = (
        "select (select count(*) from completions) as rows, (select count(*) from errors) as failed, "
        "(select rows_failed from runs) as said, (select count(*) from steps) as steps, "
        "(select num_steps from runs) as num_steps, (select count(*) from tiers) as tiers"
    )
    done = run_cli("query", sql, finished_job, *DATE, "--json")
    (row,) = json.loads(done.stdout)
    assert (row["rows"], row["failed"], row["said"], row["tiers"]) == (40, 1, 1, 0)
    assert row["steps"] == row["num_steps"] > 0


def test_the_printed_views_run_in_a_plain_duckdb(finished_job: Path, run_cli: Cli) -> None:
    script = run_cli("query", "--views", finished_job, *DATE).stdout
    connection = duckdb.connect()
    connection.execute(script)
    assert connection.sql("select count(*) from completions where error is null").fetchall() == [(39,)]
    assert connection.sql("select status, run_id in (select run_id from steps) from runs").fetchall() == [
        ("finished", True)
    ]


def test_views_of_a_folder_without_runs_are_empty_and_have_their_columns(
    tmp_path: Path, write_job: Callable[..., Path], run_cli: Cli
) -> None:
    job = write_job(tmp_path, [{"text": "a"}])
    sql = "select count(*) as n, sum(wall_s) as s from runs, steps, tiers where used_bytes > 0 and seconds > 0"
    assert json.loads(run_cli("query", sql, job, "--json").stdout) == [{"n": 0, "s": None}]


def test_csv_and_parquet_hold_the_same_rows_as_json(finished_job: Path, run_cli: Cli, tmp_path: Path) -> None:
    sql = "select row_index, id, completion, [row_index, 1] as list, error from completions order by 1"
    rows = json.loads(run_cli("query", sql, finished_job, *DATE, "--format", "json").stdout)
    path = tmp_path / "rows.parquet"
    run_cli("query", sql, finished_job, *DATE, "--format", "parquet", "--output", path)
    assert pq.read_table(path).to_pylist() == rows
    run_cli("query", sql, finished_job, *DATE, "--format", "csv", "--output", tmp_path / "rows.csv")
    read = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))
    assert [row["completion"] for row in read] == [row["completion"] or "" for row in rows]
    assert json.loads(read[3]["list"]) == [3, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "rows.parquet"]


def test_rows_that_are_written_beside_the_parts_leave_the_next_run_as_it_is(
    tmp_path: Path, write_job: Callable[..., Path], run_cli: Cli
) -> None:
    job = write_job(tmp_path, [{"text": "a"}], output={"path": "out"})
    assert run_cli("run", job).returncode == 0
    for name in ("out/rows.csv", "out/deeper/rows.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        table_format = "parquet" if name.endswith(".parquet") else "csv"
        done = run_cli("query", "select 1 as n", job, "--format", table_format, "--output", tmp_path / name)
        assert done.returncode == 0 and (tmp_path / name).is_file(), done.stderr
    (part,) = (tmp_path / "out").glob("part-*.parquet")
    before = part.read_bytes()
    done = run_cli("query", "select 1 as n", job, "--format", "parquet", "--output", part)
    assert done.returncode == 2 and "would stand among the files of runs" in done.stderr
    assert part.read_bytes() == before and run_cli("run", job).returncode == 0


def test_json_stays_json_where_a_number_is_none(finished_job: Path, run_cli: Cli) -> None:
    done = run_cli(
        "query",
        "select 'nan'::double as a, ['-inf'::double] as b, map {'k': 'nan'::double} as m",
        finished_job,
        "--json",
    )
    assert json.loads(done.stdout) == [{"a": None, "b": [None], "m": [["k", None]]}]


def test_a_statement_comes_from_standard_input_where_none_is_given(finished_job: Path, run_cli: Cli) -> None:
    done = run_cli("query", finished_job, *DATE, input="select count(*) as n from errors\n")
    assert done.stdout.split() == ["n", "-", "1", "(1", "row)"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("select 1", "select 2", "{job}"), "one SQL statement"),
        (("select 1", "{job}", "--format", "parquet"), "needs --output"),
        (("select nothing from completions", "{job}"), "nothing"),
        (("select 1; select 2", "{job}"), "one SQL statement"),
        (("select 1", "absent.yaml"), "absent.yaml"),
        ((), "Missing argument"),
    ],
)
def test_wrong_usage_is_said_and_ends_with_2(
    finished_job: Path, run_cli: Cli, arguments: tuple[str, ...], reason: str
) -> None:
    done = run_cli("query", *(argument.format(job=finished_job) for argument in arguments))
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(finished_job: Path, run_cli: Cli) -> None:
    done = run_cli("query", "select 1", finished_job, "--output", "/dev/null/x")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_moments_that_python_does_not_have_are_written_as_duckdb_writes_them(finished_job: Path, run_cli: Cli) -> None:
    sql = (
        "select date '12000-01-02' as d, timestamp '12000-01-02 03:04:05' as t, 1 as n, [date '12000-01-02'] as l, "
        "timestamp_ns '2026-11-30 01:02:03.123456789' as ns, null::date as none"
    )
    texts = ["12000-01-02", "12000-01-02 03:04:05", "1", "[12000-01-02]", "2026-11-30 01:02:03.123456789"]
    for form in ("table", "csv", "json"):
        done = run_cli("query", sql, finished_job, *DATE, "--format", form)
        assert done.returncode == 0 and all(text in done.stdout for text in texts), done.stderr
    assert json.loads(done.stdout)[0]["none"] is None


def test_a_statement_that_is_no_text_and_a_standard_input_that_is_closed_are_refused(finished_job: Path) -> None:
    program = [sys.executable, "-c", "from batchllm.cli.main import main; main()", "query", str(finished_job), *DATE]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}

    def refused(command: list[str], **given: object) -> bytes:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=90, **given)  # type: ignore[call-overload]
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr
        return bytes(done.stderr)

    assert b"the statement is not Unicode text" in refused(program, input=b"select '\xff'")
    assert b"standard input is closed" in refused(["sh", "-c", 'exec "$@" <&-', "sh", *program])


def test_the_prompt_answers_keeps_history_and_survives_a_mistake(finished_job: Path, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    environment = os.environ | {"BATCHLLM_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY), "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-c", "from batchllm.cli.main import main; main()", "query", str(finished_job), *DATE],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        until = time.monotonic() + 90
        while text not in seen:
            assert time.monotonic() < until, seen
            if select.select([controller], [], [], 1.0)[0]:
                seen += os.read(controller, 65536).decode(errors="replace")

    try:
        wait_for("sql>")
        os.write(controller, b"select wrong\r")
        wait_for("batchllm: query:")
        os.write(controller, b"select 6 * 7 as answer from errors\r")
        wait_for("(1 row)")
        assert "42" in seen
        until = time.monotonic() + 60
        # The prompt takes keys some moment after it is drawn, and draws only while somebody reads.
        while process.poll() is None and time.monotonic() < until:
            os.write(controller, b"\x04")
            if select.select([controller], [], [], 0.5)[0]:
                with contextlib.suppress(OSError):
                    os.read(controller, 65536)
        assert process.poll() == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    assert "+select 6 * 7 as answer from errors" in (tmp_path / "query_history").read_text()
