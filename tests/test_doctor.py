"""What the doctor finds on this machine, and how it speaks of what is not as it should be."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchllm.doctor
from batchllm.doctor import Diagnosis, Finding, diagnose
from batchllm.job import Job, load_job
from batchllm.kernels.native import library as native_library

NAMES = {"libraries", "device", "triton", "native kernels", "kernels", "threads", "memory", "memlock", "io_uring"}
NAMES |= {"spill folder", "spill disk", "model cache"}


def by_name(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnosis.findings}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "rows.parquet")
    (tmp_path / "job.yaml").write_text(
        "name: n\nmodel: ./absent\ninput: {path: rows.parquet}\nprompt: {template: '{{ text }}'}\noutput: {path: out}\n"
    )
    return load_job(tmp_path / "job.yaml")


def test_a_machine_that_runs_the_tests_would_run_a_job(tmp_path: Path) -> None:
    diagnosis = diagnose(None, spill_folder=tmp_path)
    found = by_name(diagnosis)
    assert found.keys() >= NAMES and diagnosis.exit_code == 0
    assert "GB/s written" in found["spill disk"].text
    assert list(tmp_path.iterdir()) == []
    for finding in diagnosis.findings:
        assert finding.status == "ok" or finding.remedy, finding


def test_a_job_whose_model_is_absent_is_a_problem_and_its_input_is_counted(job: Job, tmp_path: Path) -> None:
    diagnosis = diagnose(job, spill_folder=tmp_path)
    found = by_name(diagnosis)
    assert found["model"].status == "problem" and "no such file" in found["model"].text and found["model"].remedy
    assert found["input"].text == "2 rows; the job reads text"
    assert found["output"].status == "ok" and diagnosis.exit_code == 1


def test_a_refused_ring_names_the_errno_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError(errno.EPERM, "refused")

    monkeypatch.setattr(batchllm.doctor, "check_uring_setup", refuse)
    finding = by_name(diagnose(None, spill_folder=tmp_path))["io_uring"]
    assert finding.status == "note" and "EPERM" in finding.text and "seccomp" in finding.remedy


def test_kernels_that_were_not_built_are_a_note_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native_library, "load", lambda: "not built: no compiler")
    found = by_name(diagnose(None, spill_folder=tmp_path))
    assert found["native kernels"].status == "note" and "g++" in found["native kernels"].remedy
    assert found["kernels"].text.startswith("reference")


def test_kernels_that_cannot_run_are_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHLLM_KERNELS", "imaginary")
    diagnosis = diagnose(None, spill_folder=tmp_path)
    assert by_name(diagnosis)["kernels"].status == "problem" and diagnosis.exit_code == 1


def test_a_spill_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    found = by_name(diagnose(None, spill_folder=Path("/proc/no/such")))
    assert found["spill folder"].status == "problem" or found["spill disk"].status == "note"


def test_the_text_puts_each_remedy_under_its_finding() -> None:
    text = Diagnosis((Finding("a", "ok", "fine"), Finding("b", "problem", "broken", "mend it"))).to_text()
    assert text.splitlines() == [
        "ok       a                fine",
        "problem  b                broken",
        "                          → mend it",
    ]
