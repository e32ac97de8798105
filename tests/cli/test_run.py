"""`batchllm run` at night: what stops it, what it leaves, whom it tells."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from prometheus_client.parser import text_string_to_metric_families

from batchllm.data.lock import RunLock
from batchllm.data.results import query
from batchllm.errors import OutputError
from batchllm.job import load_job
from batchllm.nightly.unattended import Reports, run_unattended
from batchllm.run_job import RunOptions
from batchllm.run_progress import Observer

DATE = "2026-11-29"
WriteJob = Callable[..., Path]
Command = Callable[..., Any]
RECORD = (
    "import json, os, sys; "
    "summary = json.load(open(os.environ['BATCHLLM_SUMMARY'])); "
    "json.dump({**{k: v for k, v in os.environ.items() if k.startswith('BATCHLLM_')}, "
    "'summary': summary, 'args': sys.argv[1:], 'cwd': os.getcwd()}, open(sys.argv[1], 'w'))"
)


def commands(**keys: list[str]) -> str:
    return "".join(f"{key}: {json.dumps(command)}\n" for key, command in keys.items())


def rows(folder: Path) -> list[tuple[object, ...]]:
    table = query("select row_index, completion, error from completions", folder / "out" / DATE)
    return [tuple(row.values()) for row in table.to_pylist()]


def test_a_complete_run_ends_at_once_and_takes_no_step(batchllm: Command, write_texts_job: WriteJob) -> None:
    job = write_texts_job(["a", "b"])
    assert batchllm("run", job, "--date", DATE, "--json").exit_code == 0
    again = batchllm("run", job, "--date", DATE, "--json")
    summary = json.loads(again.out)
    assert again.exit_code == 0
    assert summary["rows_before"] == 2 and summary["num_steps"] == 0 and summary["kernels"] == "none"


def test_a_finished_run_of_another_date_is_not_gone_on_with_where_that_date_read_other_rows(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    today = datetime.date.today()
    night = today - datetime.timedelta(days=1)
    heard = tmp_path / "heard.json"
    record = [sys.executable, "-c", RECORD, str(heard)]
    job = write_texts_job(["a", "b"], output="out", more=commands(on_success=["true"], on_failure=record))
    job.write_text(job.read_text().replace("rows.parquet", "'{{ date }}.parquet'"))
    for date, texts in ((night, ["a", "b"]), (today, ["c", "d"])):
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{date}.parquet")
    assert batchllm("run", job, "--date", str(night), "--limit", "1").exit_code == 0
    # A run that was cut short goes on with its own date: the other row is night's.
    ended = batchllm("run", job)
    assert ended.exit_code == 0 and f"t: goes on with the run of {night}, whose rows are in {tmp_path}/out" in ended.err
    assert query("select prompt_tokens from completions", tmp_path / "out").num_rows == 2
    assert not heard.exists()
    ended = batchllm("run", job)
    error = (
        f"{job}: output.path is the same for two dates; write {{{{ date }}}} into it; "
        f"{tmp_path}/out holds the finished run of {night}, and {today} reads another input"
    )
    assert ended.exit_code == 2 and ended.err.splitlines()[-1] == f"batchllm: {error}"
    told = json.loads(heard.read_text())
    assert told["BATCHLLM_EXIT_CODE"] == "2" and told["summary"]["error"] == error
    # Who names the date means it, and a table that is the same for both dates has nothing to hide.
    assert batchllm("run", job, "--date", str(night)).exit_code == 0
    job.write_text(job.read_text().replace("{{ date }}.parquet", f"{night}.parquet"))
    assert batchllm("run", job).exit_code == 0


def test_a_deadline_stops_cleanly_and_the_next_run_finishes(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    job = write_texts_job(["a"] * 40, more="")
    soon = datetime.datetime.now().astimezone() + datetime.timedelta(milliseconds=1500)
    sets = ["--set", "sampling.max_tokens=400", "--set", "engine.max_sequences=1", "--date", DATE]
    stopped = batchllm("run", job, *sets, "--deadline", soon.isoformat())
    assert stopped.exit_code == 130 and "the deadline has come" in stopped.err
    assert len(rows(tmp_path)) < 40
    finished = batchllm("run", job, *sets, "--set", "engine.max_sequences=40")
    assert finished.exit_code == 0 and [row[0] for row in rows(tmp_path)] == list(range(40))


def test_a_run_of_which_no_row_was_completed_says_so_in_one_line(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    job = write_texts_job([None, None])
    ended = batchllm("run", job, "--date", DATE, "--summary", tmp_path / "s.json")
    line = "not one of 2 rows was completed; `select error from errors` says why to a batchllm query"
    assert ended.exit_code == 1 and ended.err == f"batchllm: {line}\n"
    assert json.loads((tmp_path / "s.json").read_text())["error"] == line
    sql = "select status, finished, error from runs order by run_id desc limit 1"
    said = json.loads(batchllm("query", sql, job, "--date", DATE, "--json").out)
    assert said == [{"status": "failed", "finished": True, "error": line}]
    assert f"  error       {line}\n" in batchllm("report", job, "--date", DATE, "--text").out
    again = batchllm("backfill", job, "--from", DATE, "--to", DATE)
    assert again.exit_code == 1 and f"batchllm: {DATE}: {line}\n" in again.err


def test_more_failed_rows_than_allowed_end_the_run_with_exit_code_1_and_one_clear_line(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    texts = [None if row % 4 == 0 else "a" for row in range(40)]
    job = write_texts_job(texts)
    ended = batchllm("run", job, "--date", DATE, "--max-error-rate", "20%", "--summary", tmp_path / "s.json")
    assert ended.exit_code == 1
    line = ended.err.splitlines()[-1]
    assert line.startswith("batchllm: 10 of 40 rows carry an error (25.0%), more than the 20% that --max-error-rate")
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["exit_code"] == 1 and summary["finished"] is False and summary["num_steps"] == 0
    # The failed rows are there, and a higher rate lets the rest run.
    assert len(rows(tmp_path)) == 10
    assert batchllm("run", job, "--date", DATE, "--max-error-rate", "20%").exit_code == 1
    assert batchllm("run", job, "--date", DATE, "--max-error-rate", "0.25").exit_code == 3
    assert [row[0] for row in rows(tmp_path)] == list(range(40))


@pytest.mark.parametrize(
    "option", [["--max-error-rate", "5 rows"], ["--max-error-rate", "120%"], ["--deadline", "6am"]]
)
def test_wrong_limits_are_usage_errors_of_one_line(
    batchllm: Command, write_texts_job: WriteJob, option: list[str]
) -> None:
    ended = batchllm("run", write_texts_job(["a"]), *option)
    assert ended.exit_code == 2 and len(ended.err.splitlines()) == 1 and option[1] in ended.err


def test_retry_errors_runs_the_failed_rows_again_and_leaves_the_others(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    # Rows of 30 tokens and more need more blocks than the small pool has; with the default pool they run.
    job = write_texts_job(["ab" * 30 if row % 3 == 0 else "a" for row in range(12)])
    small = ["--set", "engine.kv.device=8KiB"]
    first = batchllm("run", job, "--date", DATE, *small)
    assert first.exit_code == 3, first.err
    before = {row[0]: row for row in rows(tmp_path)}
    assert sorted(index for index, row in before.items() if row[2]) == [0, 3, 6, 9]
    assert batchllm("run", job, "--date", DATE).exit_code == 3
    again = batchllm("run", job, "--date", DATE, "--retry-errors", "--limit", "6")
    assert again.exit_code == 0 and "2 rows that carry an error run again" in again.err
    assert sorted(row[0] for row in rows(tmp_path) if row[2]) == [6, 9]
    final = batchllm("run", job, "--date", DATE, "--retry-errors")
    assert final.exit_code == 0
    after = rows(tmp_path)
    assert [row[0] for row in after] == list(range(12)) and all(row[2] is None for row in after)
    assert all(row == before[row[0]] for row in after if row[0] % 3)


def test_the_summary_file_says_what_the_json_summary_says_and_when(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    ended = batchllm("run", write_texts_job(["a", None]), "--date", DATE, "--json", "--summary", tmp_path / "x/s.json")
    summary = json.loads((tmp_path / "x/s.json").read_text())
    assert ended.exit_code == 3 and summary.items() >= json.loads(ended.out).items()
    assert summary["date"] == DATE and summary["job_file"] == str(tmp_path / "job.yaml")
    started, end = (datetime.datetime.fromisoformat(summary[key]) for key in ("started_at", "ended_at"))
    assert datetime.timedelta() < end - started < datetime.timedelta(minutes=5)
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["s.json"]


def test_the_metrics_parse_as_prometheus_text_and_equal_the_summary(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    job = write_texts_job(["a", None, "c"])
    text = job.read_text().replace("name: t\n", 'name: "a \\"job\\" \\\\ of one line"\n')
    job.write_text(text)
    batchllm("run", job, "--date", DATE, "--summary", tmp_path / "s.json", "--metrics", tmp_path / "m.prom")
    summary = json.loads((tmp_path / "s.json").read_text())
    found = {}
    for family in text_string_to_metric_families((tmp_path / "m.prom").read_text()):
        assert family.type == "gauge" and family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("job") == 'a "job" \\ of one line'
            key = labels.get("state") or labels.get("kind") or ""
            found[sample.name.removeprefix("batchllm_run_"), key] = sample.value
    assert found["rows", "completed"] == 2 and found["rows", "failed"] == 1 and found["rows", "unanswered"] == 0
    assert found["exit_code", ""] == 3
    assert found["tokens", "completion"] == summary["completion_tokens"] == 8
    assert found["load_seconds", ""] == summary["load_s"] > 0


def test_on_success_is_told_where_all_is(batchllm: Command, write_texts_job: WriteJob, tmp_path: Path) -> None:
    heard = tmp_path / "heard.json"
    argument = "a b; $HOME * 'q'"
    more = commands(on_success=[sys.executable, "-c", RECORD, str(heard), argument], on_failure=["/no/such"])
    ended = batchllm("run", write_texts_job(["a"], more=more), "--date", DATE)
    assert ended.exit_code == 0
    told = json.loads(heard.read_text())
    assert told["BATCHLLM_EXIT_CODE"] == "0" and told["BATCHLLM_JOB"] == str(tmp_path / "job.yaml")
    assert told["BATCHLLM_OUTPUT"] == str(tmp_path / "out" / DATE) and told["cwd"] == str(tmp_path)
    assert told["args"] == [str(heard), argument] and told["summary"]["rows_completed"] == 1


def test_on_failure_hears_of_error_rows_of_a_lock_and_of_an_input_that_is_not_there(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    heard = tmp_path / "heard.json"
    job = write_texts_job(["a", None], more=commands(on_failure=[sys.executable, "-c", RECORD, str(heard)]))
    assert batchllm("run", job, "--date", DATE).exit_code == 3
    assert json.loads(heard.read_text())["BATCHLLM_EXIT_CODE"] == "3"
    lock = RunLock(tmp_path / "out" / DATE)
    assert batchllm("run", job, "--date", DATE, "--summary", tmp_path / "s.json").exit_code == 4
    lock.release()
    told = json.loads(heard.read_text())
    assert told["BATCHLLM_EXIT_CODE"] == "4" and "another run is writing here: process" in told["summary"]["error"]
    assert told["BATCHLLM_SUMMARY"] == str(tmp_path / "s.json")
    (tmp_path / "rows.parquet").unlink()
    assert batchllm("run", job, "--date", DATE, "--metrics", tmp_path / "m.prom").exit_code == 2
    assert "there is no such file" in json.loads(heard.read_text())["summary"]["error"]
    assert 'batchllm_run_exit_code{job="t"} 2\n' in (tmp_path / "m.prom").read_text()


def test_a_command_that_fails_hangs_or_is_not_there_is_said_and_changes_no_exit_code(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    cases = {
        "on_success: /no/such cannot be started: No such file or directory": ["/no/such"],
        f"on_success: {sys.executable} ended with exit code 7": [sys.executable, "-c", "raise SystemExit(7)"],
        "on_success: sh was killed after 0.5 s": ["sh", "-c", "sleep 60; true"],
    }
    for message, command in cases.items():
        job = write_texts_job(["a"], more=commands(on_success=command) + "command_timeout_s: 0.5\n")
        ended = batchllm("run", job, "--date", DATE)
        assert ended.exit_code == 0 and message in ended.err


def test_a_report_in_a_wrong_place_is_refused_before_the_run_and_on_failure_hears_of_it(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    heard = tmp_path / "heard.json"
    job = write_texts_job(["a"], more=commands(on_failure=[sys.executable, "-c", RECORD, str(heard)]))
    (tmp_path / "file").touch()
    for option in ("--summary", "--metrics"):
        ended = batchllm("run", job, "--date", DATE, option, tmp_path / "file/s.json")
        assert ended.exit_code == 2 and len(ended.err.splitlines()) == 1
        assert f"{tmp_path}/file/s.json: cannot be written: " in ended.err and not (tmp_path / "out").exists()
        assert json.loads(heard.read_text())["summary"]["exit_code"] == 2


def test_a_report_that_cannot_be_written_after_the_run_is_an_error_once_the_command_has_run(
    write_texts_job: WriteJob, tmp_path: Path
) -> None:
    heard, report = tmp_path / "heard.json", tmp_path / "reports" / "s.json"
    job_file = write_texts_job(["a"], more=commands(on_success=[sys.executable, "-c", RECORD, str(heard)]))

    def break_folder(progress: object) -> None:
        if report.parent.is_dir():
            report.parent.rmdir()
            report.parent.touch()

    with pytest.raises(OutputError, match="reports/s.json: cannot be written"):
        run_unattended(
            load_job(job_file),
            job_file=job_file,
            options=RunOptions(),
            reports=Reports(summary=report),
            observer=Observer(progress=break_folder),
        )
    assert json.loads(heard.read_text())["summary"]["exit_code"] == 0


NO_SUMMARY = ["sh", "-c", 'echo "told $BATCHLLM_EXIT_CODE $BATCHLLM_SUMMARY $(wc -c <"$BATCHLLM_SUMMARY")"']


@pytest.mark.parametrize(("texts", "code"), [(["a"], 0), (["a", None], 3)])
def test_without_room_for_a_temporary_file_the_command_runs_all_the_same_and_the_exit_code_stays(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: Any, code: int
) -> None:
    job = write_texts_job(texts, more=commands(on_success=NO_SUMMARY, on_failure=NO_SUMMARY))
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "none"))
        ended = batchllm("run", job, "--date", DATE)
    assert ended.exit_code == code and len(rows(tmp_path)) == len(texts)
    lines = ended.err.splitlines()
    assert f"told {code} /dev/null 0" in lines
    says = f"t: the command of the job gets no summary: {tmp_path}/none/batchllm-"
    assert any(line.startswith(says) and line.endswith(": cannot be made: No such file or directory") for line in lines)
    # Where the user keeps a summary the command reads that one.
    ended = batchllm("run", job, "--date", DATE, "--summary", tmp_path / "s.json")
    size = (tmp_path / "s.json").stat().st_size
    assert ended.exit_code == code and f"told {code} {tmp_path}/s.json {size}" in ended.err.splitlines()


def test_a_full_disk_takes_neither_the_alarm_nor_the_error_away(
    write_texts_job: WriteJob, tmp_path: Path, batchllm: Command
) -> None:
    job = write_texts_job(["a"], more=commands(on_failure=NO_SUMMARY))
    # No file of this process and of what it starts may hold a byte.
    command = 'ulimit -f 0; exec "$0" -c "from batchllm.cli.main import main; main()" run "$1"'
    ended = subprocess.run(["sh", "-c", command, sys.executable, str(job)], capture_output=True, text=True)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1 and "told 1 /dev/null 0" in lines, ended.stderr
    assert any(
        "t: the command of the job gets no summary: a temporary folder: cannot be made: " in line for line in lines
    )
    assert lines[-1].startswith(f"batchllm: {tmp_path}/out/") and lines[-1].endswith("File too large")


def test_a_row_with_a_token_that_the_model_has_not_is_an_error_row_and_the_others_go_on(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.add_tokens(["<tool>"])
    pipeline.save(str(folder / "tokenizer.json"))
    job = write_texts_job(["a", "a <tool> b", "c"])
    job.write_text(job.read_text().replace(str(tiny_model), str(folder)))
    says = (
        "the prompt holds '<tool>', a token of the tokenizer alone: token 320 is beyond the model's vocabulary of 320"
    )
    for options in ([], ["--retry-errors"]):
        ended = batchllm("run", job, "--date", DATE, *options)
        assert ended.exit_code == 3, ended.err
        assert [error for _, _, error in rows(tmp_path)] == [None, f"row 1: {says}", None]
    # A form may force the text of that token: the model then says it in tokens that it has.
    forced = ["--set", "output.path=forced", "--set", "output.regex=<tool>!", "--set", "sampling.ignore_eos=false"]
    ended = batchllm("run", job, *forced, "--set", "sampling.max_tokens=40", "--set", "prompt.template=a")
    assert ended.exit_code == 0, ended.err
    completions = query("select completion from completions", tmp_path / "forced")["completion"].to_pylist()
    assert completions == ["<tool>!"] * 3


def test_the_job_may_change_its_commands_between_a_stop_and_the_resume(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    batchllm("run", write_texts_job(["a", "b"]), "--date", DATE, "--limit", "1")
    job = write_texts_job(["a", "b"], more=commands(on_success=["true"]))
    assert batchllm("run", job, "--date", DATE).exit_code == 0
    parts = sorted((tmp_path / "out" / DATE).glob("*.parquet"))
    assert len(parts) == 2 and pq.read_table(parts).num_rows == 2
    assert pq.read_schema(parts[0]).field("row_index").type == pa.int64()


def test_a_job_with_int8_weights_says_so_and_is_not_resumed_without_them(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path
) -> None:
    job = write_texts_job(["a", "b c", "d e f"])
    run = ["run", job, "--date", DATE, "--json"]
    done = batchllm(*run, "--set", "engine.weights=int8")
    assert done.exit_code == 0, done.err
    assert json.loads(done.out)["dtype"] == "float32 (int8 weights)"
    assert [row[2] for row in rows(tmp_path)] == [None] * 3
    refused = batchllm(*run)
    assert refused.exit_code == 2 and "engine.weights" in refused.err


def test_a_log_that_cannot_be_written_does_not_end_a_run(
    write_texts_job: WriteJob, tmp_path: Path, batchllm: Command
) -> None:
    job = write_texts_job(["a", "b"])
    for number, broken in enumerate(["2>/dev/full", "2>&-", "--log-format json 2>/dev/full"]):
        command = f'"$0" -c "from batchllm.cli.main import main; main()" run "$1" --date 2026-12-0{number + 1} {broken}'
        ended = subprocess.run(["sh", "-c", command, sys.executable, str(job)], capture_output=True, text=True)
        assert ended.returncode == 0, (broken, ended.stdout, ended.stderr)
        assert query("select count(*) as n from completions", tmp_path / f"out/2026-12-0{number + 1}").to_pylist() == [
            {"n": 2}
        ]


def test_memory_that_torch_does_not_get_is_one_line(
    batchllm: Command, write_texts_job: WriteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("batchllm.nightly.unattended.run_job", fail)
    ended = batchllm("run", write_texts_job(["a"]))
    assert ended.exit_code == 1 and ended.err == "batchllm: this machine's memory does not suffice\n"


def test_files_without_a_name_are_wrong_usage(batchllm: Command, write_texts_job: WriteJob) -> None:
    job = write_texts_job(["a"])
    for option in ("--summary", "--metrics"):
        ended = batchllm("run", job, option, "")
        assert ended.exit_code == 2 and "must not be empty" in ended.err


def test_a_command_that_a_signal_without_a_name_ends_is_said(batchllm: Command, write_texts_job: WriteJob) -> None:
    job = write_texts_job(["a"], more=commands(on_success=["sh", "-c", "kill -40 $$"]))
    ended = batchllm("run", job)
    assert ended.exit_code == 0 and "on_success: sh was ended by signal 40" in ended.err
