"""Input tables: which files, which rows, in which order, and the one line that each bad input gets."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchllm.data.inputs import Input, open_input
from batchllm.errors import BatchLLMError, InputError, JobError
from batchllm.job import load_job

REPOSITORY = Path(__file__).resolve().parents[2]


def open_job(
    folder: Path, source: str, *overrides: str, prompt: str = '{template: "{{ text }}"}', **named: int
) -> Input:
    text = f"name: t\nmodel: m\ninput:\n  {source}\nprompt: {prompt}\noutput: {{path: out}}\n"
    (folder / "job.yaml").write_text(text)
    spool = folder / f"spool{len(list(folder.glob('spool*')))}"
    spool.mkdir()
    return open_input(load_job(folder / "job.yaml", overrides=overrides), spool_folder=spool, **named)


def texts(input: Input) -> list[object]:
    return [cell for batch in input.batches() for cell in batch.column("text").to_pylist()]


def write(path: Path, *cells: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": list(cells)}), path)


def test_folders_and_globs_are_read_in_name_order_without_hidden_files(tmp_path: Path) -> None:
    write(tmp_path / "in/b.parquet", "b")
    write(tmp_path / "in/a.parquet", "a1", "a2")
    write(tmp_path / "in/deep/c.parquet", "c")
    for name in (".hidden.parquet", "_metadata.parquet"):
        write(tmp_path / "in" / name, "never")
    (tmp_path / "in/README.md").write_text("no table")
    assert texts(open_job(tmp_path, "path: in")) == ["a1", "a2", "b"]
    assert texts(open_job(tmp_path, "path: in/*.parquet")) == ["a1", "a2", "b"]
    assert texts(open_job(tmp_path, "path: in/**/*.parquet")) == ["a1", "a2", "b", "c"]
    assert texts(open_job(tmp_path, "path: in/b.parquet")) == ["b"]


def test_a_limit_takes_the_first_rows_and_leaves_the_fingerprint(tmp_path: Path) -> None:
    write(tmp_path / "in/a.parquet", *map(str, range(300)))
    write(tmp_path / "in/b.parquet", *map(str, range(300, 310)))
    limited = open_job(tmp_path, "path: in", limit=301)
    assert texts(limited) == [str(number) for number in range(301)] and limited.num_rows == 301
    assert limited.fingerprint == open_job(tmp_path, "path: in").fingerprint


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("path: none.parquet", "input.path: .*none.parquet: there is no such file or folder"),
        ("path: none/*.parquet", "no file matches"),
        ("path: empty", "holds no Parquet file"),
        ("path: rows0.parquet", "the input has no rows"),
        ("path: job.yaml", "cannot be read as Parquet"),
        ("path: mixed", "b.parquet: has no column 'text'; its columns: other"),
        ("path: rows.parquet\n  id: nr", "input.id: the input has no column 'nr'; its columns: text"),
        ("path: rows.parquet\n  keep: [title]", "input.keep.0: the input has no column 'title'"),
        ("path: rows.parquet\n  keep: [text, text]", "keep names a column twice"),
        ("path: differ\n  keep: [nr]", "b.parquet: column 'nr' is string here and int64 in a.parquet"),
        ("sql: selec 1", "input.sql: Parser Error"),
        ("sql: select text from none", "input.sql: Catalog Error"),
        ("sql: select 'a' as text; select 1", "needs one SELECT"),
        ("sql: create table x(a int)", "needs one SELECT"),
        ("sql: copy (select 1) to 'x.csv'", "needs one SELECT"),
        ("sql: select 'a' as text where false", "input.sql: the input has no rows"),
        ("sql: select error('stop here') as text", "input.sql: Invalid Input Error: stop here"),
        ("sql: select 'a' as text, 'b' as text", "input.sql: has two columns named 'text'"),
    ],
)
def test_a_bad_input_is_one_line(tmp_path: Path, source: str, expected: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "rows.parquet", "x")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "rows0.parquet")
    write(tmp_path / "mixed/a.parquet", "x")
    pq.write_table(pa.table({"other": ["x"]}), tmp_path / "mixed/b.parquet")
    (tmp_path / "differ").mkdir()
    pq.write_table(pa.table({"text": ["x"], "nr": [1]}), tmp_path / "differ/a.parquet")
    pq.write_table(pa.table({"text": ["x"], "nr": ["1"]}), tmp_path / "differ/b.parquet")
    with pytest.raises(BatchLLMError, match=expected) as caught:
        open_job(tmp_path, source)
    assert "\n" not in str(caught.value)


def test_sql_streams_rows_in_order_and_reads_files_beside_the_job(tmp_path: Path) -> None:
    write(tmp_path / "rows.parquet", *map(str, range(5000)))
    sql = "sql: select 'n' || text as text, text::int as n from read_parquet('rows.parquet') order by n"
    input = open_job(tmp_path, sql, "input.id=n")
    assert input.num_rows == 5000 and texts(input) == [f"n{number}" for number in range(5000)]
    assert input.columns == ("text", "n") and input.carried[0].type == pa.int32()


@pytest.mark.parametrize("expression", ["interval 1 day", "union_value(a := 1)", "[interval 1 day]"])
def test_a_column_of_a_type_that_cannot_be_staged_is_named_with_what_to_write_instead(
    tmp_path: Path, expression: str
) -> None:
    with pytest.raises(InputError) as caught:
        open_job(tmp_path, f'sql: "select 1 as id, {expression} as text"')
    message = str(caught.value)
    assert message.startswith("input.sql: its rows cannot be staged: column 'text' has the type ")
    assert message.endswith('make it text in the query, as in CAST("text" AS VARCHAR)') and "\n" not in message


def test_sql_that_answers_in_another_order_has_another_fingerprint(tmp_path: Path) -> None:
    sql = "sql: select * from (values ('a'), ('b')) as t(text) order by text {}"
    first = open_job(tmp_path, sql.format("asc")).fingerprint
    assert open_job(tmp_path, sql.format("asc")).fingerprint == first
    second = open_job(tmp_path, sql.format("desc")).fingerprint
    assert second["rows"] == first["rows"] and second != first


def test_a_changed_file_has_another_fingerprint_and_a_moved_one_the_same(tmp_path: Path) -> None:
    write(tmp_path / "one/a.parquet", "x", "y")
    write(tmp_path / "two/a.parquet", "x", "z")
    write(tmp_path / "three/a.parquet", "x", "y")
    one, two, three = (open_job(tmp_path, f"path: {name}").fingerprint for name in ("one", "two", "three"))
    assert one == three and one["rows"] == two["rows"] and one["content"] != two["content"]


def write_table(path: Path, **cells: str) -> None:
    """One row, in the form that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({name: [cell] for name, cell in cells.items()}), path)
    elif path.suffix == ".csv":
        path.write_text(",".join(cells) + "\n" + ",".join(cells.values()) + "\n")
    else:
        path.write_text(json.dumps(cells) + "\n")


def test_a_value_that_no_statistic_of_the_footer_shows_counts_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    prints = []
    for middle in ("mmm", "nnn"):
        table = pa.table({"text": ["aaa", middle, "zzz"]})
        pq.write_table(table, path, compression="none", use_dictionary=False)
        prints.append(
            (
                path.read_bytes()[-int.from_bytes(path.read_bytes()[-8:-4], "little") :],
                open_job(tmp_path, "path: a.parquet").fingerprint,
            )
        )
    assert prints[0][0] == prints[1][0] and prints[0][1] != prints[1][1]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_rows_are_those_of_the_named_file_and_nothing_comes_from_its_path(tmp_path: Path, kind: str) -> None:
    # The right name, and one that it would match as a pattern.
    for name, other in (
        ("text=path/rows", "unrelated"),
        ("rows[1]", "rows1"),
        ("a*b", "aXb"),
        ("a?b", "aYb"),
        ("in[1]/text=path/k=v/rows", "in1/text=path/k=v/rows"),
        ("it's", "its"),
    ):
        write_table(tmp_path / f"{other}.{kind}", text="of another file", more="x")
        write_table(tmp_path / f"{name}.{kind}", text=f"of {name}", more="x")
        input = open_job(tmp_path, f'path: "{name}.{kind}"')
        assert texts(input) == [f"of {name}"]
        assert input.schema.names == ["text", "more"]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_column_that_a_folders_name_names_too_counts_on_resume(tmp_path: Path, kind: str) -> None:
    prints = []
    for text in ("one", "two"):
        write_table(tmp_path / f"text=path/rows.{kind}", text=text)
        prints.append(open_job(tmp_path, f"path: text=path/rows.{kind}").fingerprint)
        spool = tmp_path / "text=path" / f"spool {text}"
        spool.mkdir()
        # The staged rows lie in the output folder, whose name may say the same.
        prints.append(open_input(load_job(tmp_path / "job.yaml"), spool_folder=spool).fingerprint)
    assert prints[0] == prints[1] and prints[2] == prints[3] and prints[0] != prints[2]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('text,n\n"open,1\nsecond,2\n', 2),
        ('text,n\nfine,1\n"open,2\nthird,3\n', 3),
        ('"text,n\nfine,1\n', 1),
        ('text;n\nfine;1\nx;"open\n', 3),
        ("text,n\n" + "fine,1\n" * 30_000 + '"open,2\n', 30_002),
        ('text,n\n"quoted",1\n' + '"fine",1\n' * 30_000 + '"open,2\n', 30_003),
    ],
)
def test_a_csv_with_a_quote_that_is_not_closed_is_refused_with_file_and_line(
    tmp_path: Path, text: str, line: int
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match="a.csv") as refused:
        open_job(tmp_path, "path: a.csv")
    said = str(refused.value)
    assert f"line {line}" in said.lower().replace("line: ", "line ") and "quote" in said and "\n" not in said


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("text,n,text\nx,1,y\n", "text"),
        ("text;n;text\nx;1;y\n", "text"),
        ('"a, b",text,"a, b"\nx,1,y\n', "a, b"),
        ("text, text\nx,y\n", "text"),
        ("\n# a remark\ntext,n,n\nx,1,2\n", "n"),
        ("n,n_1,n\nx,1,2\n", "n"),
    ],
)
def test_a_csv_with_two_columns_of_one_name_is_refused_as_parquet_is(tmp_path: Path, text: str, column: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError) as refused:
        open_job(tmp_path, "path: a.csv")
    assert str(refused.value) == f"input.path: {tmp_path}/a.csv: has two columns named {column!r}"


def test_a_second_csv_with_two_columns_of_one_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n,m\nx,1,2\n")
    (tmp_path / "b.csv").write_text("text,n,n\nx,1,2\n")
    with pytest.raises(InputError, match="b.csv: has two columns named 'n'"):
        open_job(tmp_path, "path: '*.csv'")


def test_a_csv_column_called_like_a_second_one_is_a_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n,n_1\nx,1,2\n")
    assert open_job(tmp_path, "path: a.csv", "input.keep=[n, n_1]").columns == ("text", "n", "n_1")


def test_quotes_inside_cells_other_dialects_and_lines_in_quotes_are_read(tmp_path: Path) -> None:
    for text, expected in (
        ('text,n\nshe said "hi",1\n', ['she said "hi"']),
        ('text;n\n"a;b";1\n', ["a;b"]),
        ("text,n\n'it,s',1\nok,2\n", ["it,s", "ok"]),
        ('text,n\n"two\nlines, ""quoted""",1\n', ['two\nlines, "quoted"']),
        ('text,n\n"""hi",1\n', ['"hi']),
    ):
        (tmp_path / "a.csv").write_text(text)
        assert texts(open_job(tmp_path, "path: a.csv")) == expected, text


def test_csv_and_json_lines_keep_their_text_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,id\n"007, ""x""",1.50\n2024-01-01,2\n')
    assert texts(open_job(tmp_path, "path: a.csv")) == ['007, "x"', "2024-01-01"]
    lines = [{"text": "2024-01-01T00:00:00Z", "m": [{"role": "user", "content": "hi"}]}, {"text": "007"}, {}]
    body = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "a.jsonl").write_text(body)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(body)
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert texts(open_job(tmp_path, f"path: {name}")) == ["2024-01-01T00:00:00Z", "007", None]
        assert open_job(tmp_path, f"path: {name}", prompt="{messages: m}").columns == ("m",)


@pytest.mark.parametrize("line", ["[1, 2, 3]", '"hello"', '{"text": ', "\x00"])
def test_json_lines_that_are_no_objects_are_one_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line + "\n")
    with pytest.raises(InputError, match="input.path: ") as caught:
        open_job(tmp_path, "path: a.jsonl")
    assert "\n" not in str(caught.value)


GOOD_LINE = '{"text": "x"}\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"text": nope}\n' + GOOD_LINE, 1),
        (GOOD_LINE + '{"text": nope}\n' + GOOD_LINE, 2),
        (GOOD_LINE + "\n  \n" + '{"text": "cut', 4),
        (GOOD_LINE * 2 + '{"text": "a", "text": "b"}\n' + GOOD_LINE, 3),
        ("\n" + GOOD_LINE + '{"text": "a"} {"text": "b"}\n', 3),
        (GOOD_LINE + '{"text": "a",}\n' + "[1, 2]\n" + GOOD_LINE, 3),
        (GOOD_LINE * 2 + "\n7\n", 4),
        (GOOD_LINE * 50_000 + "hello\n" + GOOD_LINE, 50_001),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson.gz"])
def test_a_wrong_line_of_json_is_named_by_its_number_in_the_file(
    tmp_path: Path, name: str, text: str, line: int
) -> None:
    with gzip.open(tmp_path / name, "wt") if name.endswith(".gz") else open(tmp_path / name, "w") as file:
        file.write(text)
    with pytest.raises(InputError, match="input.path: ") as refused:
        open_job(tmp_path, f"path: {name}")
    said = str(refused.value)
    assert re.findall(r"line (\d+)", said) == [str(line)] and str(tmp_path / name) in said and "\n" not in said


def test_the_file_of_several_that_has_the_wrong_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD_LINE * 3)
    (tmp_path / "b.jsonl").write_text(GOOD_LINE + "\n[1]\n")
    with pytest.raises(InputError, match="b.jsonl, line 3: is no JSON object"):
        open_job(tmp_path, "path: '*.jsonl'")


@pytest.mark.parametrize(
    ("source", "names", "says"),
    [
        (
            "in",
            ("a.parquet", "b.csv"),
            "in: the folder holds Parquet (a.parquet) and CSV (b.csv); name the files of one kind by a glob, such as {}/*.parquet",
        ),
        (
            "in",
            ("a.jsonl.gz", "b.pq"),
            "in: the folder holds JSON lines (a.jsonl.gz) and Parquet (b.pq); name the files of one kind by a glob, such as {}/*.jsonl.gz",
        ),
        (
            "in",
            ("a.tsv", "b.csv"),
            "in: the folder holds no Parquet file; its CSV files are named by a glob, such as {}/*.tsv",
        ),
        (
            "in/*",
            ("a.csv", "b.ndjson"),
            "in/*: matches CSV (a.csv) and JSON lines (b.ndjson); name the files of one kind by a glob, such as {}/*.csv",
        ),
    ],
)
def test_tables_of_several_kinds_are_refused_and_none_goes_unread(
    tmp_path: Path, source: str, names: tuple[str, ...], says: str
) -> None:
    (tmp_path / "in").mkdir()
    for name in names:
        (tmp_path / "in" / name).write_text("text\nx\n")
    with pytest.raises(InputError) as refused:
        open_job(tmp_path, f"path: '{source}'")
    assert str(refused.value) == f"input.path: {tmp_path}/{says.format(tmp_path / 'in')}"


def test_what_is_no_table_may_lie_in_a_folder_of_parquet(tmp_path: Path) -> None:
    write(tmp_path / "in/a.parquet", "a")
    for name in ("README.md", "_SUCCESS", "_rows.csv", ".rows.jsonl", "meta.json"):
        (tmp_path / "in" / name).write_text("text\nx\n")
    (tmp_path / "in/rows.csv").mkdir()
    assert texts(open_job(tmp_path, "path: in")) == ["a"]


@pytest.mark.parametrize(
    "type_",
    [
        pa.string(),
        pa.list_(pa.string()),
        pa.list_(pa.struct([("role", pa.string())])),
        pa.struct([("role", pa.string()), ("content", pa.string())]),
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(pa.string()))])),
    ],
)
def test_a_messages_column_of_another_shape_is_refused_before_the_model_loads(
    tmp_path: Path, type_: pa.DataType
) -> None:
    pq.write_table(pa.table({"m": pa.array([None], type_)}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="column 'm' is .*; prompt.messages wants a list of structs"):
        open_job(tmp_path, "path: a.parquet", prompt="{messages: m}")


def test_a_messages_column_of_another_shape_in_a_later_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    good = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    pq.write_table(pa.table({"m": pa.array([None], good)}), tmp_path / "in/a.parquet")
    pq.write_table(pa.table({"m": ["user: hi"]}), tmp_path / "in/b.parquet")
    with pytest.raises(InputError, match="b.parquet: column 'm' is string; prompt.messages"):
        open_job(tmp_path, "path: in", prompt="{messages: m}")


def test_a_json_field_that_turns_to_text_late_is_text_throughout(tmp_path: Path) -> None:
    lines = [json.dumps({"text": number}) for number in range(30_000)] + ['{"text": "late"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    cells = texts(open_job(tmp_path, "path: a.jsonl"))
    assert (cells[0], cells[-1], len(cells)) == ("0", "late", 30_001)


def test_a_sampling_column_that_is_missing_is_named_with_its_field(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", "x")
    with pytest.raises(InputError, match="sampling.top_p: the input has no column 'p'"):
        open_job(tmp_path, "path: a.parquet", "sampling.top_p={column: p}")


def test_a_kept_column_named_like_an_output_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"], "completion": ["y"]}), tmp_path / "a.parquet")
    with pytest.raises(JobError, match="'completion' is a column of the output"):
        open_job(tmp_path, "path: a.parquet\n  keep: [completion]")


def test_conversations_of_the_verl_files_are_read(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    path = shared_data("gsm8k_verl_parquet/gsm8k/test.parquet")
    input = open_job(tmp_path, f"path: {path}", prompt="{messages: prompt}")
    first = next(iter(input.batches())).column("prompt").to_pylist()[0]
    assert input.num_rows == 1319 and [message["role"] for message in first] == ["system", "user"]


READ_EVERY_FILE = """
import sys
from pathlib import Path
from batchllm.data.parquet_files import open_files, read_batches
from batchllm.data.cells import carried_column, python_cells
from batchllm.data.schema import carried_type
from batchllm.errors import InputError
import pyarrow as pa
for line in sys.stdin:
    path = Path(line.rstrip("\\n"))
    try:
        table = open_files([path], name="input.path")
        # Its map holds one text of 2 GB; opening it must do.
        is_huge = path.name == "large_string_map.brotli.parquet"
        for batch in () if is_huge else read_batches(table, table.schema.names, name="input.path"):
            for name in batch.schema.names:
                column = batch.column(name)
                carried_column(column, pa.field(name, carried_type(column.type)))
                python_cells(column, column=name)
        print("read", path.name, flush=True)
    except InputError as error:
        assert "\\n" not in str(error)
        print("refused", path.name, error, flush=True)
"""


def test_every_public_parquet_test_file_is_read_or_refused_in_one_line(shared_data: Callable[[str], Path]) -> None:
    root = shared_data("parquet_testing")
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    child = subprocess.run(
        [sys.executable, "-c", READ_EVERY_FILE],
        input="".join(f"{path}\n" for path in paths),
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    lines = child.stdout.splitlines()
    assert (child.returncode, child.stderr) == (0, ""), f"{child.stderr[-2000:]} after {lines[-1:]} of {len(paths)}"
    assert len(lines) == len(paths)
    encrypted = [line for line in lines if line.split()[1].endswith(".parquet.encrypted")]
    assert encrypted and all(line.startswith("refused") and "crypt" in line for line in encrypted)
    columns = [line for line in encrypted if "plaintext_footer" in line]
    assert len(columns) == 2 and all("_field' cannot be read: Cannot decrypt" in line for line in columns)
    assert sum(line.startswith("read") for line in lines) > len(lines) // 2


def test_batches_are_small_whatever_the_row_group(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", *(["x" * 1000] * 5000))
    sizes = [batch.num_rows for batch in open_job(tmp_path, "path: a.parquet").batches()]
    assert sum(sizes) == 5000 and max(sizes) <= 128


def test_the_spool_of_a_query_lies_in_the_given_folder_alone(tmp_path: Path) -> None:
    open_job(tmp_path, "sql: select 'a' as text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "spool0"]
    assert (tmp_path / "spool0/input.parquet").is_file()
