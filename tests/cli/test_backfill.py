"""`batchllm backfill` and `batchllm schedule` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchllm.data.lock import RunLock
from batchllm.data.results import query

Command = Callable[..., Any]
WriteJob = Callable[..., Path]
CHAIN = """\
name: chain
model: {model}
input:
  sql: select row_index, completion as text from read_parquet('out/{{{{ date - 1d }}}}/*.parquet') order by 1
  keep: [text]
prompt: {{raw: true, template: "{{{{ text }}}}"}}
sampling: {{max_tokens: 4, ignore_eos: true}}
output: {{path: 'out/{{{{ date }}}}'}}
engine: {{device: cpu, dtype: fp32}}
"""


def test_dates_run_in_order_each_with_the_results_of_the_one_before(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path, tiny_model: Path
) -> None:
    assert batchllm("run", write_texts_job(["the", "dog"]), "--date", "2026-02-27").exit_code == 0
    job = tmp_path / "chain.yaml"
    job.write_text(CHAIN.format(model=tiny_model))
    ended = batchllm("backfill", job, "--from", "2026-02-28", "--to", "2026-03-02", "--json")
    assert ended.exit_code == 0, ended.err
    results = [json.loads(line) for line in ended.out.splitlines()]
    assert [result["date"] for result in results] == ["2026-02-28", "2026-03-01", "2026-03-02"]
    assert all(result["rows_completed"] == 2 and result["error"] is None for result in results)
    first = query("select completion from completions", tmp_path / "out/2026-03-01")
    second = query("select text as completion from completions", tmp_path / "out/2026-03-02")
    assert first.equals(second)
    again = batchllm("backfill", job, "--from", "2026-02-28", "--to", "2026-03-02", "--json")
    assert all(json.loads(line)["num_steps"] == 0 for line in again.out.splitlines())


def test_error_rows_do_not_stop_a_backfill_and_its_exit_code_is_the_worst(
    batchllm: Command, write_texts_job: WriteJob
) -> None:
    job = write_texts_job(["a", None])
    ended = batchllm("backfill", job, "--from", "2026-11-28", "--to", "2026-11-29")
    assert ended.exit_code == 3 and "2026-11-28 t: finished" in ended.out and "2026-11-29 t: finished" in ended.out
    assert "job: 2026-11-28 to 2026-11-29: 2 dates" in ended.err and "t 2026-11-29: date 2 of 2" in ended.err
    gave_up = batchllm("backfill", job, "--from", "2026-11-30", "--to", "2026-12-01", "--max-error-rate", "10%")
    assert gave_up.exit_code == 1 and "batchllm: 1 of 2 dates were not begun" in gave_up.err
    assert "batchllm: 2026-11-30: 1 of 2 rows carry an error (50.0%)" in gave_up.err


def test_a_date_of_error_rows_alone_does_not_keep_the_next_from_running(
    batchllm: Command, write_texts_job: WriteJob
) -> None:
    job = write_texts_job([None, None])
    ended = batchllm("backfill", job, "--from", "2026-11-28", "--to", "2026-11-29", "--json")
    assert ended.exit_code == 1
    results = [json.loads(line) for line in ended.out.splitlines()]
    assert [(result["date"], result["rows_failed"]) for result in results] == [("2026-11-28", 2), ("2026-11-29", 2)]


def test_a_date_that_cannot_run_ends_the_backfill(batchllm: Command, write_texts_job: WriteJob, tmp_path: Path) -> None:
    job = write_texts_job(["a"])
    (tmp_path / "out/2026-11-29").mkdir(parents=True)
    lock = RunLock(tmp_path / "out/2026-11-29")
    ended = batchllm("backfill", job, "--from", "2026-11-28", "--to", "2026-11-30", "--json")
    lock.release()
    assert ended.exit_code == 4
    results = [json.loads(line) for line in ended.out.splitlines()]
    assert [(result["date"], result["exit_code"]) for result in results] == [("2026-11-28", 0), ("2026-11-29", 4)]
    assert "another run is writing here" in results[1]["error"] and not (tmp_path / "out/2026-11-30").exists()


def test_dates_out_of_order_and_a_folder_shared_by_dates_are_refused(
    batchllm: Command, write_texts_job: WriteJob
) -> None:
    ended = batchllm("backfill", write_texts_job(["a"]), "--from", "2026-11-29", "--to", "2026-11-28")
    assert ended.exit_code == 2 and "lies before --from" in ended.err
    shared = write_texts_job(["a"], output="out")
    ended = batchllm("backfill", shared, "--from", "2026-11-28", "--to", "2026-11-29")
    assert ended.exit_code == 2 and "output.path is the same for two dates; write {{ date }} into it" in ended.err


def test_schedule_refuses_dates_that_read_different_rows_into_one_folder(
    batchllm: Command, write_texts_job: WriteJob
) -> None:
    job = write_texts_job(["a"], output="out")
    text = job.read_text()
    assert batchllm("schedule", job, "--at", "02:30").exit_code == 0
    for dated in ("{path: 'rows {{ date - 1d }}.parquet'}", "{sql: \"select '{{ date }}' as text\"}"):
        job.write_text(text.replace("{path: rows.parquet}", dated))
        for kind in ("cron", "systemd"):
            ended = batchllm("schedule", job, "--at", "02:30", "--as", kind)
            assert ended.exit_code == 2 and ended.out == ""
            assert (
                ended.err == f"batchllm: {job}: output.path is the same for two dates; write {{{{ date }}}} into it\n"
            )
        for options in (["--date", "2026-11-29"], ["--set", "output.path=out/{{ date }}"]):
            assert batchllm("schedule", job, "--at", "02:30", "--", *options).exit_code == 0


def test_schedule_prints_an_entry_and_finds_mistakes_in_the_options_of_the_run(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    job = write_texts_job(["a"])
    log = tmp_path / "logs/x.log"
    ended = batchllm("schedule", job, "--at", "02:30", "--log", log, "--", "--deadline", "06:00")
    assert ended.exit_code == 0 and f"run {job} --deadline 06:00 >>{log} 2>&1\n" in ended.out and log.parent.is_dir()
    assert "OnCalendar=*-*-* 02:30:00" in batchllm("schedule", job, "--at", "02:30", "--as", "systemd").out
    for options, message in [
        (["--at", "02:30", "--", "--deadlin", "06:00"], "No such option"),
        (["--at", "02:30", "--", "--deadline", "6 am"], "write a time such as 06:00"),
        (["--at", "02:30", "--", "--summary", "s.json"], "write an absolute path"),
        (["--at", "2 o'clock"], "write a time of day"),
        ([], "Missing option '--at'"),
        (["--at", "02:30", "--as", "systemd", "--install"], "only a crontab can be changed"),
        (["--install", "--remove"], "exclude each other"),
    ]:
        ended = batchllm("schedule", job, *options)
        assert ended.exit_code == 2 and message in ended.err, options
