"""A real cron daemon starts real jobs at their minutes. Takes up to two minutes, since cron looks once a minute."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from batchllm.data.lock import RunLock
from batchllm.data.results import query

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = """\
name: night
model: {model}
input:
  sql: select row_index, completion as text from read_parquet('out/{{{{ date - 1d }}}}/*.parquet') order by 1
  keep: [text]
prompt: {{raw: true, template: "{{{{ text }}}}"}}
sampling: {{max_tokens: 4, ignore_eos: true}}
output: {{path: 'out/{{{{ date }}}}'}}
engine: {{device: cpu, dtype: fp32}}
on_success: [sh, -c, 'date +%s > "$BATCHLLM_OUTPUT/ended"; echo "$BATCHLLM_EXIT_CODE" > "$BATCHLLM_OUTPUT/code"']
on_failure: [sh, -c, 'cp "$BATCHLLM_SUMMARY" failed.json; echo "$BATCHLLM_EXIT_CODE" > "$BATCHLLM_OUTPUT/code"']
"""
FIRST, SECOND, LOCKED = "2026-02-28", "2026-03-01", "2026-05-05"


def batchllm(folder: Path, *arguments: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "BATCHLLM_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "batchllm", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


@pytest.mark.timeout(400)
def test_cron_starts_a_job_on_two_nights_and_an_overlapping_start_names_the_holder(
    private_cron: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    job = tmp_path / "100% night.yaml"
    job.write_text(JOB.format(model=tiny_model))
    batchllm(tmp_path, "run", str(job), "--date", "2026-02-27", "--set", "input.sql=select 7 as row_index, 'a' as text")
    entries = [
        batchllm(
            tmp_path,
            "schedule",
            str(job),
            "--at",
            "01:00",
            "--log",
            str(tmp_path / f"log {date}"),
            "--",
            "--date",
            date,
        )
        for date in (FIRST, LOCKED, SECOND)
    ]
    (tmp_path / "out" / LOCKED).mkdir(parents=True)
    lock = RunLock(tmp_path / "out" / LOCKED)
    # cron looks at the start of each minute: near its end there is no time left to start it.
    if datetime.datetime.now().second >= 55:
        time.sleep(60 - datetime.datetime.now().second)
    now = datetime.datetime.now().replace(second=0, microsecond=0)
    minutes = [now + datetime.timedelta(minutes=number) for number in (1, 1, 2)]
    crontab = "".join(
        re.sub(r"^0 1 ", f"{minute.minute} {minute.hour} ", entry, flags=re.MULTILINE)
        for minute, entry in zip(minutes, entries, strict=True)
    )
    (tmp_path / "crontab").write_text(crontab)
    script = f"crontab '{tmp_path}/crontab'; exec cron -f"
    with open(tmp_path / "log of cron", "wb") as log:
        cron = subprocess.Popen([*private_cron, script], stdout=log, stderr=log)
    try:
        ended = wait_for(tmp_path / "out" / SECOND / "ended", tmp_path=tmp_path)
    finally:
        # Its children lose their parent and would go on; none is left once the last run has ended.
        for process in [*psutil.Process(cron.pid).children(recursive=True), psutil.Process(cron.pid)]:
            process.terminate()
        cron.wait(timeout=10)
        lock.release()
    assert minutes[2].timestamp() <= ended < minutes[2].timestamp() + 55
    seen = query("select text from completions", tmp_path / "out" / SECOND)["text"].to_pylist()
    assert seen == query("select completion from completions", tmp_path / "out" / FIRST)["completion"].to_pylist()
    first_run = query("select run_id from completions", tmp_path / "out" / FIRST)["run_id"][0].as_py()
    started = datetime.datetime.strptime(first_run[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC)
    assert minutes[0].timestamp() <= started.timestamp() < minutes[1].timestamp() + 55
    codes = {date: (tmp_path / "out" / date / "code").read_text().strip() for date in (FIRST, LOCKED, SECOND)}
    assert codes == {FIRST: "0", LOCKED: "4", SECOND: "0"}
    error = json.loads((tmp_path / "failed.json").read_text())["error"]
    assert f"another run is writing here: process {os.getpid()} on " in error
    assert f"batchllm: {error}" in (tmp_path / f"log {LOCKED}").read_text()
    assert "1 of 1 answered: 1 completed" in (tmp_path / f"log {SECOND}").read_text()


def wait_for(path: Path, *, tmp_path: Path, timeout_s: float = 240) -> int:
    """The number in the file, once it is there."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
        time.sleep(0.5)
    logs = {log.name: log.read_text() for log in tmp_path.glob("log *")}
    raise AssertionError(f"cron ended no run in {timeout_s} s: {logs}")
