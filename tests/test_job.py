"""Job files: defaults, dates, paths, overrides, and the one line that each mistake gets."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest

from batchllm.errors import JobError
from batchllm.job import Job, load_job, parse_size
from batchllm.job_file import fill_dates
from batchllm.prompt import SamplingParams

GOOD = """\
name: summarise
model: smollm2-135m
input:
  path: data/docs.parquet
  keep: [title]
prompt:
  template: |
    Summarise: {{ text }}
sampling:
  max_tokens: 32
  temperature: 1e-5
output:
  path: ../out/{{ date }}
"""
DAY = datetime.date(2026, 11, 29)


def load(folder: Path, text: str, *overrides: str) -> Job:
    path = folder / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides=overrides, date=DAY)


def error_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        load(folder, text, *overrides)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(folder), "")


def test_relative_paths_are_taken_from_the_job_files_folder_and_dates_are_filled(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD)
    assert job.input.path == str(tmp_path / "data/docs.parquet")
    assert job.output.path == str(tmp_path.parent / "out/2026-11-29")
    assert job.date == DAY and job.folder == tmp_path


def test_defaults_of_sampling_are_those_of_the_engine_and_every_field_is_a_key(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD.replace("sampling:\n  max_tokens: 32\n  temperature: 1e-5\n", ""))
    assert job.sampling.params() == SamplingParams()
    assert set(type(job.sampling).model_fields) == {field.name for field in dataclasses.fields(SamplingParams)} - {
        "grammar"
    }


def test_a_number_in_exponent_form_is_a_number(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).sampling.params() == SamplingParams(max_tokens=32, temperature=1e-5)


def test_overrides_replace_and_add_values(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD, "engine.block_size=8", "sampling.stop=[a, b]", "engine.kv.device=2GiB", "seed=7")
    assert job.engine.block_size == 8 and job.engine.kv.device == 2 << 30 and job.seed == 7
    assert job.sampling.params().stop == ("a", "b")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "max_tokens: 32",
            "max_token: 32",
            "/job.yaml:10: sampling.max_token: unknown key; the nearest known key is max_tokens",
        ),
        ("name: sum", "1: sum", "/job.yaml:1: 1: unknown key; it is no text"),
        ("name: sum", "nam: sum", "/job.yaml:1: nam: unknown key; the nearest known key is name"),
        ("max_tokens: 32", "max_tokens: many", '/job.yaml:10: sampling.max_tokens: must be a whole number, not "many"'),
        ("max_tokens: 32", "max_tokens: true", "/job.yaml:10: sampling.max_tokens: must be a whole number, not true"),
        ("max_tokens: 32", "max_tokens: 0", "/job.yaml:10: sampling.max_tokens: must be at least 1, not 0"),
        (
            "max_tokens: 32",
            "max_tokens: {colum: m}",
            "/job.yaml:10: sampling.max_tokens: must be a whole number, not a mapping",
        ),
        ("temperature: 1e-5", "temperature: .nan", "/job.yaml:11: sampling.temperature: "),
        ("temperature: 1e-5", "min_tokens: 50", "/job.yaml:9: sampling: min_tokens 50 is above max_tokens 32"),
        ("name: summarise", "name: summarise\nname: b", "/job.yaml:2: not valid YAML: the key 'name' is written twice"),
        ("model: smollm2-135m\n", "", "/job.yaml: model: is missing"),
        ("keep: [title]", "sql: select 1", "/job.yaml:3: input: needs exactly one of path, sql and openai_batch"),
        (
            "  template: |\n    Summarise: {{ text }}",
            "  raw: true",
            "/job.yaml:6: prompt: needs exactly one of template",
        ),
        ("{{ text }}", "{{ text", "/job.yaml:7: prompt.template: not a valid template, at its line "),
        ("{{ date }}", "{{ dat }}", "/job.yaml:13: output.path: {{ dat }} is not known here"),
        ("name: summarise", "name: [", "/job.yaml:3: not valid YAML: "),
        (
            "name: summarise\n",
            "name: a\n---\nname: summarise\n",
            "/job.yaml:2: a second YAML document begins here; a job file holds one, so remove the line ---",
        ),
        (
            "name: summarise",
            "name: {{ name }}",
            "/job.yaml:1: text that begins with {{ must stand in quotes; without them YAML reads a mapping",
        ),
        ("name: summarise", 'name: ""', "/job.yaml:1: name: must not be empty"),
        (
            "name: summarise",
            "engine: {device: gpu}\nname: summarise",
            "/job.yaml:1: engine.device: must be 'auto', 'cuda' or 'cpu', not \"gpu\"",
        ),
        ("keep: [title]", "keep: [title, 3]", "/job.yaml:5: input.keep.1: must be text, not 3"),
        (
            "name: summarise",
            "name: !!python/object/apply:os.getcwd []",
            "/job.yaml:1: not valid YAML: could not determine",
        ),
    ],
)
def test_a_mistake_names_file_line_and_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert error_of(tmp_path, GOOD.replace(old, new)).startswith(expected)


def test_a_mistake_in_an_override_names_the_override(tmp_path: Path) -> None:
    assert error_of(tmp_path, GOOD, "engine.blok_size=8").startswith(
        "--set engine.blok_size=8: engine.blok_size: unknown"
    )
    assert error_of(tmp_path, GOOD, "engine.block_size=no").startswith(
        '--set engine.block_size=no: engine.block_size: must be a whole number, not "no"'
    )
    assert error_of(tmp_path, GOOD, "block_size").startswith("--set block_size: write it as key.key=value")
    assert error_of(tmp_path, GOOD, "name.x=1").startswith("--set name.x=1: name is not a mapping")
    assert error_of(tmp_path, GOOD, "prompt.template={{ text }}") == (
        "--set prompt.template={{ text }}: text that begins with {{ must stand in quotes; without them YAML reads a mapping"
    )
    assert error_of(tmp_path, GOOD, "input={path:x}").endswith(
        "input.path:x: unknown key; YAML wants a space after a colon"
    )
    assert error_of(tmp_path, GOOD, "sampling.stop={a, b}").endswith("sampling.stop: must be a list, not a mapping")


@pytest.mark.parametrize("text", ["", "[1, 2]", "hello", "null", "\x00", "a: 1\n---\nb: 2", "a: &a [*a]"])
def test_a_file_that_is_no_job_is_one_line(tmp_path: Path, text: str) -> None:
    assert "job.yaml" in error_of(tmp_path, text)


@pytest.mark.parametrize("value", ["!!bool maybe", '!!int ""', '!!float ""', "!!timestamp foo"])
def test_a_tag_before_text_of_another_type_is_one_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: {value}\n")
    with pytest.raises(JobError, match="job.yaml: not valid YAML: a tag such as !!int stands before") as refused:
        load_job(path)
    assert "\n" not in str(refused.value)


def test_missing_file_folder_and_bytes_that_are_no_text_are_job_errors(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\xfe")
    for name, text in (("none.yaml", "no such job file"), ("", "cannot be read"), ("bytes.yaml", "not UTF-8")):
        with pytest.raises(JobError, match=text):
            load_job(tmp_path / name)


def test_words_that_old_yaml_took_for_booleans_times_and_dates_stay_text(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD, "sampling.stop=[yes, no, 06:00, 2026-11-29, 010]")
    assert job.sampling.params().stop == ("yes", "no", "06:00", "2026-11-29", "010")


def test_sampling_from_columns_is_checked_row_by_row(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD, "sampling.temperature={column: t}", "sampling.top_k={column: k}")
    assert job.sampling.columns() == {"temperature": "t", "top_k": "k"}
    assert job.sampling.params({"temperature": 0.5, "top_k": 40.0}) == SamplingParams(
        max_tokens=32, temperature=0.5, top_k=40
    )
    assert job.sampling.params({"temperature": None, "top_k": None}) == SamplingParams(max_tokens=32)
    with pytest.raises(ValueError, match="column 't' as sampling.temperature"):
        job.sampling.params({"temperature": -1.0, "top_k": 1})
    with pytest.raises(ValueError, match="column 'k' as sampling.top_k"):
        job.sampling.params({"temperature": 0.0, "top_k": "many"})
    with pytest.raises(ValueError, match="'k'"):
        job.sampling.params({"temperature": 0.0, "top_k": {"column": "x"}})


def test_logit_bias_takes_a_mapping_of_ids(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD, "sampling.logit_bias={7: -100, 3: 1.5}")
    assert job.sampling.params().logit_bias == ((3, 1.5), (7, -100.0))
    assert "sampling.logit_bias" in error_of(tmp_path, GOOD, "sampling.logit_bias={a: 1}")


def test_fingerprint_ignores_throughput_and_place_and_sees_the_rest(tmp_path: Path) -> None:
    first = load(tmp_path, GOOD).fingerprint_parts()
    other = tmp_path / "moved"
    other.mkdir()
    assert load(other, GOOD, "engine.max_step_tokens=64", "engine.block_size=32").fingerprint_parts() == first
    changed = load(tmp_path, GOOD, "sampling.top_p=0.5").fingerprint_parts()
    assert [key for key in first if first[key] != changed[key]] == ["sampling.top_p"]
    moved = load_job(tmp_path / "job.yaml", date=DAY + datetime.timedelta(days=1)).fingerprint_parts()
    assert [key for key in first if first[key] != moved[key]] == ["date"]


def test_a_model_is_a_path_only_when_written_as_one_or_lying_there(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, "model=org/name").model == "org/name"
    assert load(tmp_path, GOOD, "model=./weights").model == str(tmp_path / "weights")
    (tmp_path / "org/name").mkdir(parents=True)
    assert load(tmp_path, GOOD, "model=org/name").model == str(tmp_path / "org/name")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/{{ date }}/b", "a/2026-11-29/b"),
        ("{{date-1d}}", "2026-11-28"),
        ("{{ date + 2w }}", "2026-12-13"),
        ("{{ date - 1h }}", "2026-11-28T23"),
        ("{{ date - 30h }}", "2026-11-27T18"),
        ("{{ date - 333d }} {{ date }}", "2025-12-31 2026-11-29"),
        ("no variable { date }", "no variable { date }"),
    ],
)
def test_date_variables(text: str, expected: str) -> None:
    assert fill_dates(text, date=DAY) == expected


def test_a_date_outside_the_calendar_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the calendar"):
        fill_dates("{{ date - 999999w }}", date=DAY)


def test_sizes_are_bytes() -> None:
    assert [parse_size(text) for text in ("2GiB", "500 MB", "1.5k", 4096, "auto")] == [
        2 << 30,
        500_000_000,
        1500,
        4096,
        "auto",
    ]
    for wrong in ("2 apples", "", -1, 0, True, None, "0", 1.5, "9" * 400 + "k"):
        with pytest.raises(ValueError, match="auto or a size"):
            parse_size(wrong)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ("schema: {type: strnig}", "output.schema: Invalid type: strnig"),
        ("schema: {type: array, uniqueItems: true}", 'output.schema: Unimplemented keys: ["uniqueItems"]'),
        ("schema: nothing.json", "output.schema: there is no file /nothing.json"),
        ("regex: 'a('", "output.regex: not a valid regular expression: unclosed group"),
        ("choice: [a, a]", "output.choice: names a label twice"),
        ("choice: {column: 3}", "output.choice.column: must be text, not 3"),
        ("choice: []", "output.choice: must be a list of at least one label"),
        ("choices: [a]", "output.choices: unknown key; the nearest known key is choice"),
    ],
)
def test_a_constraint_that_is_wrong_is_refused_with_its_key_and_line(
    tmp_path: Path, constraint: str, expected: str
) -> None:
    assert error_of(tmp_path, f"{GOOD}  {constraint}\n") == f"/job.yaml:14: {expected}"


def test_two_constraints_are_refused(tmp_path: Path) -> None:
    message = error_of(tmp_path, f"{GOOD}  regex: a\n  choice: [b]\n")
    assert message == "/job.yaml:12: output: takes one of schema, choice and regex, not choice and regex"


def test_a_schema_file_is_found_beside_the_job_file_and_its_content_is_in_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text('{"type": "boolean"}')
    job = load(tmp_path, f"{GOOD}  schema: answer.json\n")
    assert job.output.json_schema == {"type": "boolean"}
    assert job.fingerprint_parts()["output.schema"] == {"type": "boolean"}
    assert job.output.grammar() == load(tmp_path, f"{GOOD}  schema: {{type: boolean}}\n").output.grammar()
