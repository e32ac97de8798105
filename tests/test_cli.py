"""Whole commands as processes: exit codes, one line for each mistake, nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

Rows = list[dict[str, Any]]


def read_rows(folder: Path) -> Rows:
    """The parts as any DuckDB reads them."""
    sql = f"select * from read_parquet('{folder}/*.parquet') order by row_index, sample_index"
    return duckdb.connect().sql(sql).to_arrow_table().to_pylist()


def texts(count: int) -> list[str]:
    return [f"Summarise document {row}: the engine reads row {row * 7} of the batch." for row in range(count)]


def test_a_run_of_good_rows_ends_with_0_and_a_summary_that_matches_the_parts(
    commands: Any, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    job = write_job(tmp_path, {"nr": list(range(20)), "text": texts(20)}, input={"id": "nr"})
    result = commands.run("run", job, "--json", folder=tmp_path)
    assert (result.code, result.stderr) == (0, "")
    summary = json.loads(result.stdout)
    rows = read_rows(tmp_path / "out")
    assert [row["row_index"] for row in rows] == list(range(20)) == [row["id"] for row in rows]
    assert summary["rows_completed"] == 20 and summary["rows_failed"] == 0 and summary["exit_code"] == 0
    assert summary["completion_tokens"] == sum(row["completion_tokens"] for row in rows)
    assert summary["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"eos", "length"}
    again = commands.run("run", job, folder=tmp_path)
    assert again.code == 0 and "20 from earlier runs" in again.stdout
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 1


def run_in_one_line(
    commands: Any, *arguments: str | Path, folder: Path, code: int, says: str, environment: dict[str, str] | None = None
) -> None:
    """The command ends with `code` and one line on stderr that holds `says`; nothing on stdout, no traceback."""
    result = commands.run(*arguments, folder=folder, environment=environment)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("tiny: ")]
    assert (result.code, result.stdout) == (code, ""), result.stderr
    assert len(lines) == 1 and lines[0].startswith("batchllm: ") and says in lines[0], result.stderr


BAD_JOBS: list[tuple[dict[str, Any], int, str]] = [
    ({"engine": {"blocksize": 4}}, 2, "unknown key; the nearest known key is block_size"),
    ({"sampling": {"max_tokens": 0}}, 2, "sampling.max_tokens: must be at least 1, not 0"),
    ({"input": {"path": "rows.parquet", "sql": "select 1"}}, 2, "needs exactly one of path, sql and openai_batch"),
    ({"prompt": {"template": "{{ text "}}, 2, "not a valid template"),
    (
        {"prompt": {"template": "{% for a in b %}" * 25 + "{% endfor %}" * 25}},
        2,
        "not a valid template: it is nested too deeply",
    ),
    ({"prompt": {"template": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"}}, 2, "not a valid template"),
    ({"sampling": {"max_tokens": 10**12}}, 2, "sampling.max_tokens: must be at most 1000000000, not 1000000000000"),
    ({"output": {"path": "out/{{ yesterday }}"}}, 2, "{{ yesterday }} is not known here"),
    ({"prompt": {"template": "{{ txt }}"}}, 2, "names column 'txt', which the input lacks; did you mean 'text'?"),
    ({"input": {"keep": ["title"]}}, 2, "the input has no column 'title'; its columns: text"),
    ({"sampling": {"temperature": {"column": "heat"}}}, 2, "the input has no column 'heat'"),
    ({"input": {"path": "none.parquet"}}, 2, "there is no such file or folder"),
    ({"input": {"path": "none-*.parquet"}}, 2, "no file matches"),
    ({"input": {"path": "job.yaml"}}, 2, "cannot be read as Parquet"),
    ({"input": {"path": None, "sql": "select text from 'rows.parquet' where false"}}, 2, "the input has no rows"),
    ({"input": {"path": None, "sql": "selec"}}, 2, "input.sql: Parser Error"),
    ({"model": "no-such-model"}, 2, "no such file or folder"),
    ({"model": "../elsewhere"}, 2, "no such file or folder"),
    ({"engine": {"kv": {"device": "100"}}}, 2, "hold no block of"),
    ({"engine": {"kv": {"device": "100TB"}}}, 2, "bytes are not to be had on cpu"),
    ({"output": {"path": "rows.parquet"}}, 2, "the output folder cannot be made"),
    ({"output": {"path": "."}}, 2, "holds rows.parquet, which is no part of a run"),
]


@pytest.mark.parametrize(("sections", "code", "says"), BAD_JOBS, ids=[says for *_, says in BAD_JOBS])
def test_what_cannot_run_is_one_line_with_its_exit_code(
    commands: Any, write_job: Callable[..., Path], tmp_path: Path, sections: dict[str, Any], code: int, says: str
) -> None:
    job = write_job(tmp_path, {"text": texts(3)}, **sections)
    run_in_one_line(commands, "run", job, folder=tmp_path, code=code, says=says)
    assert not list(tmp_path.glob("**/part-*"))


def test_a_wrong_command_line_ends_with_2(commands: Any, write_job: Callable[..., Path], tmp_path: Path) -> None:
    job = write_job(tmp_path, {"text": texts(1)})
    run_in_one_line(commands, "run", "none.yaml", folder=tmp_path, code=2, says="there is no such job file")
    run_in_one_line(commands, "run", job, "--set", "engine.blok=1", folder=tmp_path, code=2, says="--set engine.blok=1")
    run_in_one_line(commands, "run", job, "--set", "engine", folder=tmp_path, code=2, says="write it as key.key=value")
    for arguments in (
        ["run", job, "--limit", "0"],
        ["run", job, "--dat", "x"],
        ["run"],
        ["fly"],
        ["run", job, "--date", "1"],
    ):
        result = commands.run(*arguments, folder=tmp_path)
        assert result.code == 2 and result.stderr.count("\n") == 1 and result.stderr.startswith("batchllm: ")


def test_no_rows_in_a_parquet_file_is_one_line(commands: Any, write_job: Callable[..., Path], tmp_path: Path) -> None:
    job = write_job(tmp_path, {"text": []}, prompt={"template": "same"})
    run_in_one_line(commands, "run", job, folder=tmp_path, code=2, says="the input has no rows")


def test_an_environment_that_asks_for_unknown_kernels_is_one_line(
    commands: Any, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    job = write_job(tmp_path, {"text": texts(1)})
    environment = {"BATCHLLM_KERNELS": "quantum"}
    run_in_one_line(
        commands, "run", job, folder=tmp_path, code=2, says="BATCHLLM_KERNELS=quantum", environment=environment
    )


def test_exit_codes_tell_all_good_some_bad_and_none_good_apart(
    commands: Any, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    for name, cells, code in (
        ("good", texts(10), 0),
        ("some", [*texts(9), None], 3),
        ("none", [None] * 10, 1),
    ):
        job = write_job(tmp_path / name, {"text": cells})
        result = commands.run("run", job, "--json", folder=tmp_path)
        summary = json.loads(result.stdout)
        rows = read_rows(tmp_path / name / "out")
        failed = sum(row["error"] is not None for row in rows)
        assert (result.code, summary["exit_code"]) == (code, code), result.stderr
        assert (summary["rows_completed"], summary["rows_failed"]) == (10 - failed, failed)
        assert len(rows) == 10 and failed == sum(cell is None for cell in cells)


def test_a_limit_counts_its_own_rows_only(commands: Any, write_job: Callable[..., Path], tmp_path: Path) -> None:
    job = write_job(tmp_path, {"text": [*texts(4), None, *texts(3)]})
    assert commands.run("run", job, folder=tmp_path).code == 3
    result = commands.run("run", job, "--limit", "3", "--json", folder=tmp_path)
    summary = json.loads(result.stdout)
    assert result.code == 0
    assert (summary["num_rows"], summary["rows_completed"], summary["rows_failed"]) == (3, 3, 0)


def test_bad_rows_are_error_rows_and_the_others_go_on(
    commands: Any, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    """Rows over the context first, in the middle and last; a template error; a request larger than the KV pool."""
    long = "The engine reads every prompt. " * 400
    cells = [long, *texts(3), long, "BOOM", *texts(3), long]
    tokens = [4] * 10
    tokens[7] = 600
    job = write_job(
        tmp_path,
        {
            "nr": list(range(10)),
            "text": cells,
            "most": tokens,
            "divisor": [0 if cell == "BOOM" else 1 for cell in cells],
        },
        input={"id": "nr"},
        prompt={"template": "{{ 1 // divisor }} {{ text }}"},
        sampling={"max_tokens": {"column": "most"}},
        engine={"kv": {"device": "200 KiB"}},
    )
    result = commands.run("run", job, folder=tmp_path)
    assert result.code == 3 and "Traceback" not in result.stderr
    rows = read_rows(tmp_path / "out")
    assert [row["id"] for row in rows] == list(range(10))
    errors = {row["row_index"]: row["error"] for row in rows if row["error"] is not None}
    assert errors.keys() == {0, 4, 5, 7, 9}
    for row in (0, 4, 9):
        assert "the prompt has " in errors[row] and "the limit is 1023" in errors[row]
    assert "division" in errors[5] and "KV blocks; the pool has" in errors[7]
    assert all(row["completion"] is None and row["finish_reason"] == "error" for row in rows if row["error"])
    assert all(row["completion_tokens"] > 0 for row in rows if not row["error"])
    listed = commands.run("query", "select row_index from errors", job, "--json", folder=tmp_path)
    assert [row["row_index"] for row in json.loads(listed.stdout)] == [0, 4, 5, 7, 9]


def test_the_folder_of_another_job_is_refused_and_keeps_its_rows(
    commands: Any, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    job = write_job(tmp_path, {"text": texts(4)})
    assert commands.run("run", job, folder=tmp_path).code == 0
    before = read_rows(tmp_path / "out")
    says = "sampling.max_tokens was 8, is 9"
    run_in_one_line(commands, "run", job, "--set", "sampling.max_tokens=9", folder=tmp_path, code=2, says=says)
    write_job(tmp_path, {"text": texts(5)})
    run_in_one_line(commands, "run", job, folder=tmp_path, code=2, says="input data.rows was 4, is 5")
    assert read_rows(tmp_path / "out") == before


@pytest.mark.parametrize("raw", [True, False])
def test_empty_and_blank_cells_are_rows_of_their_own(
    commands: Any, write_job: Callable[..., Path], tmp_path: Path, raw: bool
) -> None:
    cells = ["", None, " ", "\n", "\u200b", "text"]
    job = write_job(tmp_path, {"text": cells}, prompt={"raw": raw})
    assert commands.run("run", job, folder=tmp_path).code == 3
    rows = read_rows(tmp_path / "out")
    failed = [row["row_index"] for row in rows if row["error"]]
    assert failed == [0, 1]
    assert "the prompt is empty" in rows[0]["error"] and "'text' is null" in rows[1]["error"]
    assert all(row["prompt_tokens"] > 0 for row in rows[2:])


def test_public_files_that_are_broken_or_encrypted_end_in_one_line_without_a_traceback_or_a_signal(
    commands: Any, write_job: Callable[..., Path], shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shared_data("parquet_testing")
    every = sorted(path for path in folder.rglob("*") if path.suffix in (".parquet", ".encrypted"))
    files = [path for path in every if path.parent.name == "bad_data" or path.suffix == ".encrypted"] + every[::9]
    assert len(files) > 20
    job = write_job(tmp_path, {"text": texts(1)}, prompt={"template": "{{ row }}", "max_prompt_tokens": 1000})
    wrong: list[str] = []
    codes: dict[int, int] = {}
    for number, path in enumerate(files):
        settings = ["--limit", "2", "--set", f"input.path={path}", "--set", f"output.path=out/{number}"]
        settings += ["--set", "sampling.max_tokens=1"]
        result = commands.run("run", job, *settings, folder=tmp_path)
        codes[result.code] = codes.get(result.code, 0) + 1
        errors = [line for line in result.stderr.splitlines() if not line.startswith("tiny: ")]
        if result.code not in (0, 1, 2, 3) or len(errors) > 1 or "Traceback" in result.stderr:
            wrong.append(f"{path.relative_to(folder)}: {result.code}: {errors[:1]} … {errors[-1:]}")
    assert wrong == []
    assert codes[2] > 10 and codes[0] > 5


def test_damaged_input_files_are_one_line_and_a_damaged_part_is_named(
    commands: Any, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    job = write_job(tmp_path, {"text": [f"{row} {row * row}" for row in range(3000)]})
    whole = (tmp_path / "rows.parquet").read_bytes()
    for damaged in (whole[:2000] + bytes(2000) + whole[4000:], whole[:-20], whole[:100], b"", whole[20:]):
        (tmp_path / "rows.parquet").write_bytes(damaged)
        run_in_one_line(commands, "run", job, folder=tmp_path, code=2, says="cannot be read")
    (tmp_path / "rows.csv").write_bytes(b"text\n\xff\xfe\nok\n")
    run_in_one_line(
        commands, "run", job, "--set", "input.path=rows.csv", folder=tmp_path, code=2, says="rows.csv: Invalid Input"
    )
    (tmp_path / "rows.parquet").write_bytes(whole)
    (tmp_path / "out" / "part-000000-x.parquet").write_bytes(b"rubbish")
    run_in_one_line(commands, "run", job, folder=tmp_path, code=2, says="part-000000-x.parquet: cannot be read")
    run_in_one_line(commands, "query", "select 1", job, folder=tmp_path, code=2, says="the results cannot be read")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
        ("{{ text.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(99999999) %}x{% endfor %}", "range"),
        ("{{ text.nothing.more }}", "nothing"),
    ],
)
def test_a_template_that_fails_in_every_row_fails_the_rows_and_not_the_program(
    commands: Any, write_job: Callable[..., Path], tmp_path: Path, template: str, says: str
) -> None:
    job = write_job(tmp_path, {"text": texts(3)}, prompt={"template": template})
    result = commands.run("run", job, folder=tmp_path)
    assert result.code == 1 and "Traceback" not in result.stderr
    errors = [row["error"] for row in read_rows(tmp_path / "out")]
    assert len(errors) == 3 and all(says in error.lower() for error in errors), errors
