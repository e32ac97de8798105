"""`batchllm doctor` and `batchllm report` as commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from batchllm.kernels.native import library as native_library

Cli = Callable[..., subprocess.CompletedProcess[str]]
DATE = ("--date", "2026-11-29")


def test_doctor_checks_a_job_and_speaks_json(finished_job: Path, run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli("doctor", finished_job, "--json", "--spill-folder", tmp_path)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0
    assert "2 layers" in found["model"]["text"] and found["input"]["text"].startswith("40 rows")


def test_doctor_names_a_token_that_the_model_does_not_have(finished_job: Path, run_cli: Cli, tmp_path: Path) -> None:
    wrong = ("--set", "sampling.stop_token_ids=[258]", "--json", "--spill-folder", tmp_path)
    done = run_cli("doctor", finished_job, *wrong)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and found["model"]["status"] == "problem"
    assert found["model"]["text"].startswith(
        "sampling.stop_token_ids: token 258 is beyond the model's vocabulary of 258"
    )
    assert found["model"]["remedy"] == "correct that key of the job"


@pytest.mark.parametrize(("kernels", "status", "code"), [("", "problem", 1), ("reference", "note", 0)])
def test_a_wrong_native_path_is_one_finding_and_a_problem_only_where_a_run_would_take_it(
    run_cli: Cli, tmp_path: Path, kernels: str, status: str, code: int
) -> None:
    if isinstance(native_library.load(), str):
        pytest.skip("needs native kernels")
    environment = {"BATCHLLM_NATIVE_PATH": "sse9", "BATCHLLM_KERNELS": kernels}
    done = run_cli("doctor", "--json", "--spill-folder", tmp_path, **environment)
    findings = json.loads(done.stdout)["findings"]
    named = [finding for finding in findings if "sse9" in finding["text"]]
    assert [(finding["name"], finding["status"]) for finding in named] == [("native kernels", status)]
    assert named[0]["remedy"] == "unset BATCHLLM_NATIVE_PATH" and done.returncode == code


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
