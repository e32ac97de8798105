"""The sample jobs: their data is made from Python's own documentation, and each job fits its table."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchllm.data.inputs import open_input
from batchllm.job import load_job

JOBS = Path(__file__).resolve().parents[2] / "jobs"


@pytest.fixture(scope="module")
def sample_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, str(JOBS / "make_data.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", ["summarise", "docqa", "classify"])
def test_a_sample_job_fits_its_table(sample_data: Path, name: str, tmp_path: Path) -> None:
    job = load_job(JOBS / f"{name}.yaml")
    assert job.input.path is not None and Path(job.input.path).parent == JOBS / "data"
    table = sample_data / Path(job.input.path).name
    local = load_job(JOBS / f"{name}.yaml", overrides=[f"input.path={table}"])
    input = open_input(local, spool_folder=tmp_path)
    assert 40 <= input.num_rows <= 100
    assert Path(job.output.path) == JOBS.parent / "out" / name / job.date.isoformat()


def test_the_nightly_job_takes_each_row_of_its_table_once_a_week(sample_data: Path, tmp_path: Path) -> None:
    shutil.copytree(sample_data, tmp_path / "jobs/data")
    shutil.copy(JOBS / "nightly.yaml", tmp_path / "jobs/nightly.yaml")
    titles: list[str] = []
    for day in range(7):
        date = datetime.date(2026, 11, 23) + datetime.timedelta(days=day)
        job = load_job(tmp_path / "jobs/nightly.yaml", date=date)
        assert job.output.path == str(tmp_path / "out/nightly" / date.isoformat())
        (tmp_path / f"spool{day}").mkdir()
        input = open_input(job, spool_folder=tmp_path / f"spool{day}")
        assert 5 <= input.num_rows <= 15
        titles += [title for batch in input.batches() for title in batch.column("title").to_pylist()]
    assert sorted(titles) == sorted(pq.read_table(sample_data / "python_docs.parquet")["title"].to_pylist())


def test_sample_documents_are_prose_of_a_few_hundred_words_and_questions_share_documents(sample_data: Path) -> None:
    docs = pq.read_table(sample_data / "python_docs.parquet").to_pylist()
    assert all(100 <= len(row["text"].split()) <= 400 for row in docs)
    rows = pq.read_table(sample_data / "docqa.parquet").to_pylist()
    assert len({row["document"] for row in rows}) == 4 and len({row["question"] for row in rows}) == 12
    assert all(len(row["document"].split()) == 900 for row in rows)
    assert len({row["title"] for row in rows[:8]}) > 1


def test_making_the_data_again_gives_the_same_bytes(sample_data: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(JOBS / "make_data.py"), str(tmp_path)], check=True, capture_output=True)
    for path in sample_data.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
