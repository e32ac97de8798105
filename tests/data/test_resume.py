"""From job file to parts and back: a run that stops is finished by the next one, whatever happened between."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchllm.data.inputs import open_input
from batchllm.data.outputs import OutputFolder, OutputWriter, make_fingerprint
from batchllm.data.parts import recorded_date
from batchllm.data.prompts import Staging, stage_prompts
from batchllm.data.results import query
from batchllm.data.schema import completion_schema
from batchllm.errors import FolderError
from batchllm.job import Job, load_job
from batchllm.prompt import Completion

NIGHT = datetime.date(2026, 11, 29)
JOB = """\
name: t
model: m
input: {path: rows.parquet, id: nr, keep: [title]}
prompt: {raw: true, template: "{{ date }} {{ text }}"}
sampling: {n: {column: samples}}
output: {path: out}
"""


class WordTokenizer:
    """Numbers words as they come; raw prompts need no more."""

    bos_id = None
    add_bos = False
    bos_token = None
    eos_token = None
    chat_template = None
    special_tokens: dict[str, int] = {}

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]:
        arrays = []
        for text in texts:
            start = len(self.words)
            self.words += text.split(" ")
            arrays.append(np.arange(start, len(self.words), dtype=np.int32))
        return arrays

    def token_text(self, token_id: int) -> str:
        return self.words[token_id]


def make_rows(folder: Path, *, num_rows: int = 300) -> None:
    texts = [None if row % 50 == 7 else f"text{row}" for row in range(num_rows)]
    table = pa.table(
        {
            "nr": [row // 2 for row in range(num_rows)],
            "title": [f"title{row}" for row in range(num_rows)],
            "text": texts,
            "samples": [1 + row % 2 for row in range(num_rows)],
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    (folder / "job.yaml").write_text(JOB)


def run(job: Job, *, stop_after: int | None = None, limit: int | None = None) -> int:
    """Echoes every prompt (`stop_after` of them) as its completion; returns how many rows were staged."""
    with OutputFolder(job.output.path) as output:
        input = open_input(job, spool_folder=output.staging, limit=limit)
        fingerprint = make_fingerprint(job=job.fingerprint_parts(), input=input.fingerprint, model="w", version="1")
        done = output.resume(fingerprint=fingerprint, num_rows=input.total_rows)
        staging = Staging.create(output.staging, input=input, done=done)
        schema = completion_schema(list(input.carried), with_token_ids=False, with_logprobs=False)
        tokenizer = WordTokenizer()
        with OutputWriter(output, schema=schema, kept=staging.kept, model=job.model) as writer:
            errors = stage_prompts(
                job, input=input, tokenizer=tokenizer, staging=staging, max_context=64, vocab_size=1 << 20
            )
            for bad in errors:
                writer.add_error(bad.row_index, bad.message)
            places = np.random.default_rng(0).permutation(staging.store.num_prompts)[:stop_after]
            for place in places.tolist():
                prompt = staging.store.prompt(place)
                text = " ".join(tokenizer.words[token] for token in prompt.token_ids)
                sample = int(staging.store.sample_index[place])
                completion = Completion(prompt.row_index, sample, text=f"{sample} {text}", finish_reason="eos")
                writer.add(completion, num_samples=prompt.sampling.n)
        staging.close()
        return len(np.unique(staging.store.row_index))


def check(folder: Path, *, date: datetime.date, num_rows: int = 300) -> None:
    rows = query("select row_index, sample_index, id, title, completion, error from completions", folder / "out")
    found = [tuple(row.values()) for row in rows.to_pylist()]
    expected: list[tuple[object, ...]] = []
    for row in range(num_rows):
        if row % 50 == 7:
            message = f"row {row}: prompt.template: column 'text' is null"
            expected.append((row, 0, row // 2, f"title{row}", None, message))
        else:
            for sample in range(1 + row % 2):
                expected.append((row, sample, row // 2, f"title{row}", f"{sample} {date} text{row}", None))
    assert found == expected


def test_a_stopped_run_is_finished_by_the_next_and_a_third_has_nothing_to_do(tmp_path: Path) -> None:
    make_rows(tmp_path)
    job = load_job(tmp_path / "job.yaml", date=NIGHT)
    assert run(job, stop_after=100) == 294
    done = query("select distinct row_index from completions where error is null", tmp_path / "out").num_rows
    assert 0 < done < 100
    assert run(job) == 294 - done
    assert run(job) == 0
    check(tmp_path, date=NIGHT)


def test_a_resume_after_midnight_keeps_the_recorded_date(tmp_path: Path) -> None:
    make_rows(tmp_path)
    run(load_job(tmp_path / "job.yaml", date=NIGHT), stop_after=10)
    morning = load_job(tmp_path / "job.yaml", date=NIGHT + datetime.timedelta(days=1))
    with pytest.raises(FolderError, match='date was "2026-11-29", is "2026-11-30"'):
        run(morning)
    run(load_job(tmp_path / "job.yaml", date=recorded_date(Path(morning.output.path))))
    check(tmp_path, date=NIGHT)


def test_a_limited_run_is_a_beginning_of_the_whole_one(tmp_path: Path) -> None:
    make_rows(tmp_path)
    job = load_job(tmp_path / "job.yaml", date=NIGHT)
    assert run(job, limit=20) == 19
    assert query("select max(row_index) as last from completions", tmp_path / "out")["last"].to_pylist() == [19]
    assert run(job, limit=10) == 0
    assert run(job) == 275
    check(tmp_path, date=NIGHT)


def test_changed_rows_are_refused_with_what_changed(tmp_path: Path) -> None:
    make_rows(tmp_path)
    job = load_job(tmp_path / "job.yaml", date=NIGHT)
    run(job, stop_after=10)
    make_rows(tmp_path, num_rows=301)
    with pytest.raises(FolderError, match="input data.rows was 300, is 301"):
        run(job)


def test_results_of_a_folder_are_those_of_its_parts_whatever_the_folder_is_called(tmp_path: Path) -> None:
    make_rows(tmp_path)
    for name in ("model=big/title=none", "out[1]", "o*t", "o?t"):
        (tmp_path / "job.yaml").write_text(JOB)
        job = load_job(tmp_path / "job.yaml", date=NIGHT, overrides=[f'output.path="{name}"'])
        run(job, stop_after=20)
        assert run(job) > 0
        rows = query("select distinct model, title like 'title%' as own, run_id from completions", tmp_path / name)
        assert set(rows["model"].to_pylist()) == {job.model} and rows["own"].to_pylist() == [True, True]
        assert query("select count(distinct row_index) as n from completions", tmp_path / name)["n"].to_pylist() == [
            300
        ]
