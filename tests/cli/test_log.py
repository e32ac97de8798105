"""`--log-format json`: stderr holds one JSON object a line, whatever comes of the run."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
WriteTexts = Callable[..., Path]


def events(err: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in err.splitlines()]
    for event in found:
        assert list(event)[:4] == ["time", "level", "event", "job"]
        assert datetime.datetime.fromisoformat(event["time"]).utcoffset() == datetime.timedelta(0)
    return found


def test_a_run_tells_its_notes_its_progress_and_its_summary(batchllm: Command, write_texts_job: WriteTexts) -> None:
    done = batchllm("run", write_texts_job(["a", "b", None]), "--log-format", "json")
    assert done.exit_code == 3 and done.out.startswith("t: finished")
    said = events(done.err)
    assert {event["event"] for event in said} == {"note", "progress", "summary"}
    assert {event["level"] for event in said} == {"info"} and {event["job"] for event in said} == {"t"}
    *_, last = [event for event in said if event["event"] == "progress"]
    assert (last["rows_done"], last["rows_total"], last["rows_before"]) == (3, 3, 0)
    assert (said[-1]["rows_failed"], said[-1]["exit_code"], said[-1]["finished"]) == (1, 3, True)


def test_what_ends_a_command_is_an_event_with_its_exit_code(
    batchllm: Command, write_texts_job: WriteTexts, tmp_path: Path
) -> None:
    job = write_texts_job(["a"])
    done = batchllm("run", job, "--log-format", "json", "--set", "engine.kv.device=5 parsecs")
    (error,) = events(done.err)
    assert (error["level"], error["event"], error["exit_code"], done.exit_code) == ("error", "error", 2, 2)
    assert "engine.kv.device" in error["message"] and "\n" not in error["message"]
    done = batchllm("run", tmp_path / "none.yaml", "--log-format", "json", "--json")
    assert done.exit_code == 2 and events(done.err)[0]["job"] == "none" and done.out == ""


@pytest.mark.parametrize(
    ("failure", "message", "exit_code"),
    [
        (MemoryError(), "this machine's memory does not suffice", 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "this machine's memory does not suffice", 1),
        (FileNotFoundError(2, "No such file or directory", "/proc/x"), "/proc/x: No such file or directory", 1),
    ],
)
def test_what_is_one_line_on_a_terminal_is_one_message_in_the_log(
    batchllm: Command,
    write_texts_job: WriteTexts,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    message: str,
    exit_code: int,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise failure

    monkeypatch.setattr("batchllm.nightly.unattended.run_job", fail)
    if isinstance(failure, OSError):  # the rest of this process still needs its stdout
        monkeypatch.setattr("batchllm.cli.log.drop_output", lambda: None)
    done = batchllm("run", write_texts_job(["a"]), "--log-format", "json")
    (error,) = events(done.err)
    assert (error["message"], error["exit_code"], done.exit_code) == (message, exit_code, exit_code)
    assert "traceback" not in error


def test_wrong_usage_ends_with_2_and_its_message(batchllm: Command, write_texts_job: WriteTexts) -> None:
    job = write_texts_job(["a"])
    done = batchllm("run", job, "--summary", job, "--log-format", "json")
    (error,) = events(done.err)
    assert (error["exit_code"], done.exit_code) == (2, 2) and "traceback" not in error
    assert (
        error["message"] == f"--summary {job} is the job file too; give it a file of its own (see batchllm run --help)"
    )


def test_too_many_errors_are_an_error_event_after_the_summary(batchllm: Command, write_texts_job: WriteTexts) -> None:
    job = write_texts_job([None, None, "a", "b"])
    done = batchllm("run", job, "--log-format", "json", "--max-error-rate", "10%")
    assert done.exit_code == 1
    summary, error = events(done.err)[-2:]
    assert summary["event"] == "summary" and error["message"] == summary["too_many_errors"]


def test_a_backfill_names_each_date(batchllm: Command, write_texts_job: WriteTexts) -> None:
    job = write_texts_job(["a"])
    done = batchllm("backfill", job, "--from", "2026-11-01", "--to", "2026-11-02", "--log-format", "json")
    assert done.exit_code == 0, done.err
    assert [event["date"] for event in events(done.err) if event["event"] == "summary"] == ["2026-11-01", "2026-11-02"]


def test_a_deadline_that_comes_is_a_warning(batchllm: Command, write_texts_job: WriteTexts) -> None:
    soon = datetime.datetime.now().astimezone() + datetime.timedelta(seconds=1)
    job = write_texts_job(
        [f"row {number}" for number in range(400)], more="engine: {device: cpu, dtype: fp32, max_sequences: 1}\n"
    )
    job.write_text(job.read_text().replace("engine: {device: cpu, dtype: fp32}\n", "", 1))
    done = batchllm("run", job, "--log-format", "json", "--deadline", soon.isoformat())
    assert done.exit_code == 130
    (warning,) = [event for event in events(done.err) if event["level"] == "warning"]
    assert "the deadline has come" in warning["message"]
