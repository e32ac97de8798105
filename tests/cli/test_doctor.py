"""`batchllm doctor` and `batchllm report` as commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
DATE = ("--date", "2026-11-29")


def test_doctor_checks_a_job_and_speaks_json(finished_job: Path, run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli("doctor", finished_job, "--json", "--spill-folder", tmp_path)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0
    assert "2 layers" in found["model"]["text"] and found["input"]["text"].startswith("40 rows")


def test_report_writes_a_page_into_the_run_folder_and_prints_its_path(finished_job: Path, run_cli: Cli) -> None:
    done = run_cli("report", finished_job, *DATE)
    path = Path(done.stdout.strip())
    assert path.name == "report.html" and path.parent.parent.name == ".runs"
    page = path.read_text()
    assert 'data-figure="rows_with_error" data-value="1"' in page and "<b>38</b>" not in page
    assert page.count('class="status finished"') == 3


def test_report_prints_text_or_json(finished_job: Path, run_cli: Cli) -> None:
    text = run_cli("report", finished_job, *DATE, "--text").stdout
    assert "40 answered, 1 with errors" in text and "runs of this job" in text
    figures = json.loads(run_cli("report", finished_job, *DATE, "--json").stdout)["figures"]
    assert figures["rows_answered"] == 40 and figures["status"] == "finished"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("report", "{job}", "--text", "--json"), "choose one"),
        (("report", "{job}", "--date", "2001-01-01"), "records no run"),
        (("report", "{job}", "--date", "2026-11-29", "--run", "x"), "records no run 'x'"),
        (("doctor", "--date", "2026-11-29"), "name its file"),
        (("doctor", "absent.yaml"), "absent.yaml"),
    ],
)
def test_wrong_usage_is_said_and_ends_with_2(
    finished_job: Path, run_cli: Cli, arguments: tuple[str, ...], reason: str
) -> None:
    done = run_cli(*(argument.format(job=finished_job) for argument in arguments))
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr
