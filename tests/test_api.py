"""The Python interface: rows from memory in, Arrow out, no job file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import pytest

from batchllm import Job, load_job, plan, run
from batchllm.errors import FolderError, InputError, JobError

COLUMNS = {"nr": [30, 10, 20, 10], "text": ["the engine", "a row", None, "a document"]}
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(chat_model: Path) -> MakeJob:
    """A function (changed sections) -> a job over the tiny model, without input and output."""

    def make(**sections: Any) -> Job:
        values: dict[str, Any] = {
            "model": str(chat_model),
            "prompt": {"template": "{{ text }}"},
            "sampling": {"max_tokens": 4, "ignore_eos": True},
            "engine": {"dtype": "fp32", "device": "cpu"},
        }
        return Job(**{**values, **sections})

    return make


def says(table: pa.Table) -> list[tuple[Any, ...]]:
    return [(row["row_index"], row["completion"], row["error"] is None) for row in table.to_pylist()]


def test_a_job_of_keyword_arguments_answers_the_rows_of_a_table_in_their_order(make_job: MakeJob) -> None:
    result = run(make_job(input={"id": "nr", "keep": ["text"]}), pa.table(COLUMNS))
    table = result.to_table()
    assert table.column("row_index").to_pylist() == [0, 1, 2, 3]
    assert table.column("id").to_pylist() == COLUMNS["nr"] and table.column("text").to_pylist() == COLUMNS["text"]
    assert table.column("completion_tokens").to_pylist() == [4, 4, 0, 4]
    assert "column 'text' is null" in table.column("error").to_pylist()[2]
    assert (result.summary.rows_completed, result.summary.rows_failed) == (3, 1)


def test_a_job_file_says_the_same_as_the_job_made_in_python(
    make_job: MakeJob, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_job(tmp_path, COLUMNS, sampling={"max_tokens": 4, "ignore_eos": True})
    assert says(run(load_job(path)).to_table()) == says(run(make_job(), pa.table(COLUMNS)).to_table())


@pytest.mark.parametrize("kind", ["batch", "reader", "path", "pandas", "polars"])
def test_every_kind_of_rows_gives_the_same_answers(make_job: MakeJob, tmp_path: Path, kind: str) -> None:
    table = pa.table({"text": ["one", "two words", "three"]})
    rows: Any
    if kind in ("pandas", "polars"):
        if importlib.util.find_spec(kind) is None:
            pytest.skip(f"needs {kind}")
        library: Any = pytest.importorskip(kind)
        rows = library.DataFrame(table.to_pydict())
    elif kind == "path":
        rows = tmp_path / "rows.parquet"
        pq.write_table(table, rows)
    else:
        rows = table.to_batches()[0] if kind == "batch" else table.to_reader(max_chunksize=1)
    assert says(run(make_job(), rows).to_table()) == says(run(make_job(), table).to_table())


def test_batches_hold_all_rows_in_order_and_no_more_than_asked(make_job: MakeJob) -> None:
    result = run(make_job(sampling={"max_tokens": 1}), pa.table({"text": [f"row {row}" for row in range(25)]}))
    batches = list(result.iter_batches(max_rows=10))
    assert all(batch.num_rows <= 10 for batch in batches)
    assert [row for batch in batches for row in batch.column("row_index").to_pylist()] == list(range(25))


def test_a_temporary_folder_lives_as_long_as_its_result(make_job: MakeJob) -> None:
    result = run(make_job(), pa.table({"text": ["a"]}))
    folder = result.folder
    assert folder.exists()
    del result
    assert not folder.exists()


def test_a_named_folder_is_resumed_by_the_same_call_and_refused_to_other_rows(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job, rows = make_job(output={"path": str(tmp_path / "out")}), {"text": ["a", "b", "c"]}
    assert run(job, pa.table(rows), limit=2).summary.rows_completed == 2
    whole = run(job, pa.table(rows))
    assert (whole.summary.rows_before, whole.summary.rows_completed) == (2, 3)
    with pytest.raises(FolderError, match="input data.content"):
        run(job, pa.table({"text": ["a", "b", "d"]}))


def test_a_plan_counts_the_tokens_that_rows_share(make_job: MakeJob) -> None:
    job = make_job(prompt={"template": "The same long beginning of every row. {{ text }}"})
    explanation = plan(job, pa.table({"text": ["a", "b", "c"]})).explanation
    assert explanation.num_prompts == 3
    assert explanation.unique_prompt_tokens < explanation.prompt_tokens


def test_mistakes_are_typed_errors(make_job: MakeJob, tmp_path: Path) -> None:
    table = pa.table({"text": ["a"]})
    with pytest.raises(pydantic.ValidationError, match="max_tokens"):
        make_job(sampling={"max_tokens": 0})
    with pytest.raises(JobError, match="no rows"):
        run(make_job())
    with pytest.raises(JobError, match="leave one of them out"):
        run(make_job(input={"path": "x.parquet"}), table)
    with pytest.raises(JobError, match="rows: list is no table"):
        run(make_job(), [1, 2])  # type: ignore[arg-type]
    for ask in (run, plan):
        with pytest.raises(JobError, match="limit: must be at least 1, not 0"):
            ask(make_job(), table, limit=0)
    with pytest.raises(pydantic.ValidationError, match="not a valid template, at its line 1"):
        make_job(prompt={"template": "{{ text"})
    with pytest.raises(InputError, match="nothing.parquet"):
        run(make_job(), tmp_path / "nothing.parquet")


def test_each_row_may_bring_its_own_labels(make_job: MakeJob) -> None:
    labels = [["yes", "no"], ["red", "green", "blue"], ["yes", "no"], None, [], ["a", "a"], ["x", None]]
    table = pa.table(
        {"text": [f"row {number}" for number in range(7)], "labels": pa.array(labels, pa.list_(pa.string()))}
    )
    rows = run(make_job(output={"choice": {"column": "labels"}}), table).to_table().to_pylist()
    assert [row["completion"] in (one or []) for row, one in zip(rows[:3], labels, strict=False)] == [True] * 3
    assert {row["stop_reason"] for row in rows[:3]} <= {"choice", None}
    assert [row["error"] for row in rows[3:]] == [
        "row 3: column 'labels' as output.choice: must be a list of at least one label",
        "row 4: column 'labels' as output.choice: must be a list of at least one label",
        "row 5: column 'labels' as output.choice: names a label twice",
        "row 6: column 'labels' as output.choice: must be text, not nothing",
    ]


def test_a_column_of_labels_that_is_missing_is_named(make_job: MakeJob) -> None:
    with pytest.raises(InputError, match=r"output\.choice: the input has no column 'labels'"):
        run(make_job(output={"choice": {"column": "labels"}}), pa.table({"text": ["a"]}))
