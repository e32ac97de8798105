"""A run against the world: signals, kill -9, a second run, a full disk, midnight, and two jobs in one process."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest

from batchllm.job import load_job
from batchllm.run_job import run_job
from batchllm.run_summary import RunSummary

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_ROWS = 120
SAYS = "row_index, sample_index, id, completion, finish_reason, error, prompt_tokens, completion_tokens, token_ids"

Rows = list[dict[str, Any]]
WriteJob = Callable[..., Path]


def what_rows_say(folder: Path) -> Rows:
    """All that must be equal in two runs of the same rows, in row order."""
    sql = f"select {SAYS} from read_parquet('{folder}/*.parquet') order by row_index, sample_index"
    return duckdb.connect().sql(sql).to_arrow_table().to_pylist()


class Reader:
    """Reads a folder with DuckDB again and again; one thread, since the run beside it wants the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.connection = duckdb.connect(config={"threads": 1})

    def count_rows(self) -> tuple[int, int]:
        """Rows and distinct rows that are there now; (0, 0) where no part is visible yet."""
        if not any(self.folder.glob("*.parquet")):
            return 0, 0
        sql = f"select count(*), count(distinct (row_index, sample_index)) from read_parquet('{self.folder}/*.parquet')"
        ((num_rows, num_distinct),) = self.connection.execute(sql).fetchall()
        return num_rows, num_distinct


def wait_for_rows(folder: Path, num_rows: int, command: Any) -> None:
    """Until DuckDB reads that many; the command must not end before."""
    reader = Reader(folder)
    while reader.count_rows()[0] < num_rows:
        assert not command.has_ended
        time.sleep(0.02)


@contextmanager
def watched(folder: Path) -> Iterator[list[tuple[int, int]]]:
    """Reads the folder with DuckDB over and over meanwhile; a moment at which that fails, or a row is there twice, fails."""
    seen: list[tuple[int, int]] = []
    failures: list[BaseException] = []
    over = threading.Event()

    def watch() -> None:
        reader = Reader(folder)
        while not over.wait(0.05) and not failures:
            try:
                seen.append(reader.count_rows())
                assert seen[-1][0] == seen[-1][1]
            except (duckdb.Error, AssertionError) as error:
                failures.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
    assert failures == []


def long_columns(num_rows: int = NUM_ROWS) -> dict[str, Any]:
    """Mixed lengths; every 40th row cannot be run."""
    words = ["engine", "row", "batch", "answer", "document", "question", "plans", "finished"]
    return {
        "nr": [row // 2 for row in range(num_rows)],
        "text": [
            None if row % 40 == 7 else " ".join(words[(row * step) % 8] for step in range(1, 4 + row % 37))
            for row in range(num_rows)
        ],
        "most": [5 + (row * 7) % 40 for row in range(num_rows)],
    }


@pytest.fixture
def long_job(write_job: WriteJob) -> Callable[..., Path]:
    """A function (folder) -> job of some seconds: sampled and greedy rows, two samples each, errors among them."""

    def write(folder: Path, **sections: Any) -> Path:
        return write_job(
            folder,
            long_columns(),
            input={"id": "nr"},
            sampling={"max_tokens": {"column": "most"}, "temperature": 0.8, "n": 2, "ignore_eos": True},
            output={"path": "out", "token_ids": True},
            engine={"dtype": "fp32", "device": "cpu", "max_sequences": 8},
            **sections,
        )

    return write


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the long job says when nothing happens to it, and how long it takes; filled by the first test that asks."""
    return {}


@pytest.fixture
def expected(undisturbed: dict[str, Any], commands: Any, long_job: WriteJob, tmp_path: Path) -> dict[str, Any]:
    if not undisturbed:
        job = long_job(tmp_path / "undisturbed")
        result = commands.run("run", job, folder=tmp_path, part_rows=40)
        assert result.code == 3, result.stderr
        undisturbed["rows"] = what_rows_say(tmp_path / "undisturbed" / "out")
        undisturbed["seconds"] = result.seconds
    return undisturbed


def test_an_undisturbed_run_answers_every_sample_in_order(expected: dict[str, Any]) -> None:
    rows = expected["rows"]
    failed = [row for row in range(NUM_ROWS) if row % 40 == 7]
    keys = [(row, sample) for row in range(NUM_ROWS) for sample in range(1 if row in failed else 2)]
    assert [(row["row_index"], row["sample_index"]) for row in rows] == keys
    assert [row["row_index"] for row in rows if row["error"]] == failed
    assert all(row["id"] == row["row_index"] // 2 for row in rows)
    assert all(row["completion_tokens"] == len(row["token_ids"]) for row in rows if not row["error"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_130_and_the_same_command_finishes_it(
    commands: Any, long_job: WriteJob, expected: dict[str, Any], tmp_path: Path, number: signal.Signals
) -> None:
    job, out = long_job(tmp_path), tmp_path / "out"
    with watched(out):
        command = commands.start("run", job, folder=tmp_path, part_rows=20)
        wait_for_rows(out, 60, command)
        sent_at = time.monotonic()
        command.send(number)
        result = command.wait()
        assert result.code == 130 and time.monotonic() - sent_at < 10
        assert "stopping after this step; what is done is kept" in result.stderr
        assert "stopped; run the same command again" in result.stdout and "Traceback" not in result.stderr
        before, _ = Reader(out).count_rows()
        assert 60 <= before < len(expected["rows"])
        assert not list(out.glob(".staging-*")) and not list(out.glob(".part-*"))
        rest = commands.run("run", job, "--json", folder=tmp_path)
    assert rest.code == 3 and json.loads(rest.stdout)["rows_before"] > 0
    assert what_rows_say(out) == expected["rows"]


@pytest.mark.parametrize("waits_for_summary", [False, True])
def test_ctrl_c_again_and_again_ends_with_130_and_loses_nothing(
    commands: Any, long_job: WriteJob, expected: dict[str, Any], tmp_path: Path, waits_for_summary: bool
) -> None:
    job, out = long_job(tmp_path), tmp_path / "out"
    # A process of its own: the command server's have no teardown that a signal could fall into.
    program = [sys.executable, "-c", "from batchllm.cli.main import main; main()", "run", str(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    pipe = subprocess.PIPE
    with watched(out), subprocess.Popen(program, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        while not list(out.glob(".staging-*/prompts/*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        if waits_for_summary:
            assert "stopped; run the same command again" in process.stdout.readline()
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert said.count("stopping after this step") == 1 and "Traceback" not in said
    assert commands.run("run", job, folder=tmp_path).code == 3
    assert what_rows_say(out) == expected["rows"]


def test_a_stop_while_rows_are_read_comes_at_once_and_loses_nothing(
    commands: Any, write_job: WriteJob, tmp_path: Path
) -> None:
    count = 60_000
    job = write_job(tmp_path, {"text": [f"{row} " * 60 for row in range(count)]}, sampling={"max_tokens": 1})
    command = commands.start("run", job, folder=tmp_path)
    while not list(tmp_path.glob("out/.staging-*/prompts/*")):
        time.sleep(0.01)
    sent_at = time.monotonic()
    command.send(signal.SIGINT)
    result = command.wait()
    assert result.code == 130 and time.monotonic() - sent_at < 5
    assert f"0 of {count} answered" in result.stdout


def test_a_run_killed_at_random_moments_says_in_the_end_what_an_undisturbed_one_says(
    commands: Any, long_job: WriteJob, expected: dict[str, Any], tmp_path: Path
) -> None:
    job, out = long_job(tmp_path), tmp_path / "out"
    moments = [0.15, 0.9, 0.4, 0.65, 0.8]
    with watched(out) as seen:
        for moment in moments:
            command = commands.start("run", job, folder=tmp_path, part_rows=10, part_s=0.05)
            time.sleep(moment * expected["seconds"])
            command.send(signal.SIGKILL)
            assert command.wait().code in (-signal.SIGKILL, 3)
        result = commands.run("run", job, folder=tmp_path, part_rows=10)
    assert result.code == 3, result.stderr
    assert what_rows_say(out) == expected["rows"]
    assert seen == sorted(seen)
    assert not list(out.glob(".staging-*")) and not list(out.glob(".part-*"))


def test_a_second_run_ends_with_4_and_names_the_holder_and_a_killed_holder_blocks_nobody(
    commands: Any, long_job: WriteJob, expected: dict[str, Any], tmp_path: Path
) -> None:
    job, out = long_job(tmp_path), tmp_path / "out"
    first = commands.start("run", job, folder=tmp_path, part_rows=20)
    while not (out / ".lock").exists() or not (out / ".lock").read_text():
        time.sleep(0.01)
    second = commands.run("run", job, folder=tmp_path)
    lines = [line for line in second.stderr.splitlines() if not line.startswith("tiny: ")]
    assert second.code == 4 and len(lines) == 1
    assert f"another run is writing here: process {first.pid} on " in lines[0]
    first.send(signal.SIGKILL)
    assert first.wait().code == -signal.SIGKILL
    third = commands.run("run", job, folder=tmp_path, part_rows=20)
    assert third.code == 3, third.stderr
    assert what_rows_say(out) == expected["rows"]


def test_a_query_while_a_run_is_at_it_reads_what_is_there(commands: Any, long_job: WriteJob, tmp_path: Path) -> None:
    job, out = long_job(tmp_path), tmp_path / "out"
    running = commands.start("run", job, folder=tmp_path, part_rows=20)
    wait_for_rows(out, 1, running)
    result = commands.run("query", "select count(*) as n from completions", job, "--json", folder=tmp_path)
    assert result.code == 0 and json.loads(result.stdout)[0]["n"] > 0
    running.send(signal.SIGKILL)


def run_script(job: Path, *, folder: Path, script: str = "") -> subprocess.Popen[str]:
    """A process started afresh, as a shell or cron would: no server before it, and Python's own teardown behind it."""
    script = script or "from batchllm.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", script, "run", str(job)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_ends_by_itself_within_ten_seconds_of_its_last_row(write_job: WriteJob, tmp_path: Path) -> None:
    job = write_job(tmp_path, {"text": ["one row", "and another"]})
    with run_script(job, folder=tmp_path) as command:
        output, errors = command.communicate(timeout=120)
        ended_at = time.time()
    assert (command.returncode, "2 completed" in output) == (0, True), errors
    assert "Traceback" not in errors and "leaked" not in errors
    (part,) = (tmp_path / "out").glob("*.parquet")
    assert ended_at - part.stat().st_mtime < 10


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from batchllm.data import parts
write_part = parts.write_part
def write_with_a_full_disk(table, path, *, fingerprint):
    # From here on no file of this process may grow beyond a page.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    write_part(table, path, fingerprint=fingerprint)
from batchllm.data import outputs
outputs.write_part = write_with_a_full_disk
from batchllm.cli.main import main
main()
"""


def test_a_full_output_disk_is_one_line_leaves_no_torn_part_and_a_resume_does_the_rest(
    commands: Any, long_job: WriteJob, expected: dict[str, Any], tmp_path: Path
) -> None:
    job, out = long_job(tmp_path), tmp_path / "out"
    with run_script(job, folder=tmp_path, script=FULL_DISK) as command:
        _, errors = command.communicate(timeout=120)
    lines = [line for line in errors.splitlines() if not line.startswith("tiny: ")]
    assert command.returncode == 1 and len(lines) == 1, errors
    assert "completions cannot be written: File too large" in lines[0]
    assert not list(out.glob("*.parquet")) and not list(out.glob(".part-*")) and not list(out.glob(".staging-*"))
    assert commands.run("run", job, folder=tmp_path).code == 3
    assert what_rows_say(out) == expected["rows"]


def test_two_jobs_and_one_job_twice_in_one_process_equal_processes_of_their_own(
    commands: Any, long_job: WriteJob, expected: dict[str, Any], tmp_path: Path
) -> None:
    summaries: list[RunSummary] = []
    for name, overrides in (("a", []), ("b", ["seed=5"]), ("c", [])):
        job = load_job(long_job(tmp_path / name), overrides=overrides)
        summaries.append(run_job(job))
    assert what_rows_say(tmp_path / "a" / "out") == expected["rows"] == what_rows_say(tmp_path / "c" / "out")
    other = long_job(tmp_path / "alone")
    assert commands.run("run", other, "--set", "seed=5", folder=tmp_path).code == 3
    assert what_rows_say(tmp_path / "b" / "out") == what_rows_say(tmp_path / "alone" / "out") != expected["rows"]
    assert [summary.completion_tokens for summary in summaries[::2]] == [summaries[0].completion_tokens] * 2


CLOCK_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\\n{{ strftime_now('%d %b %Y') }} {{ message.content }}"
    "<|im_end|>\\n{% endfor %}<|im_start|>assistant\\n"
)


def test_a_resume_after_midnight_keeps_the_date_of_the_first_rows(
    commands: Any, make_chat_model: Callable[..., Path], long_job: WriteJob, tmp_path: Path
) -> None:
    model = make_chat_model()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = CLOCK_TEMPLATE.replace("\\\\n", "\\n")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    night = datetime.date.today() - datetime.timedelta(days=1)
    prompt = {"template": "{{ date }} {{ text }}"}
    whole = long_job(tmp_path / "whole", model=str(model), prompt=prompt)
    assert commands.run("run", whole, "--date", night.isoformat(), folder=tmp_path).code == 3
    job, out = long_job(tmp_path / "cut", model=str(model), prompt=prompt), tmp_path / "cut" / "out"
    first = commands.start("run", job, "--date", night.isoformat(), folder=tmp_path, part_rows=20)
    wait_for_rows(out, 40, first)
    first.send(signal.SIGKILL)
    first.wait()
    # No date is given now: today is another day, and the one that the parts record is taken.
    assert commands.run("run", job, folder=tmp_path).code == 3
    assert what_rows_say(out) == what_rows_say(tmp_path / "whole" / "out")
    today = long_job(tmp_path / "today", model=str(model), prompt=prompt)
    assert commands.run("run", today, folder=tmp_path).code == 3
    assert what_rows_say(tmp_path / "today" / "out") != what_rows_say(out)
    refused = commands.run("run", job, "--date", "2020-01-01", folder=tmp_path)
    assert refused.code == 2 and f'date was "{night}", is "2020-01-01"' in refused.stderr
