"""Every command answers wrong input with one line that names it, and exit code 2."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WriteJob = Callable[..., Path]

COMMANDS: dict[str, list[str]] = {
    "run": ["run"],
    "plan": ["plan"],
    "report": ["report", "--text"],
    "query": ["query", "select 1"],
    "schedule": ["schedule", "--at", "02:30"],
    "backfill": ["backfill", "--from", "2026-11-01", "--to", "2026-11-01"],
    "doctor": ["doctor"],
    "simulate": ["simulate"],
    "cache ls": ["cache", "ls"],
    "cache verify": ["cache", "verify"],
    "cache rm": ["cache", "rm"],
}
"""Every command that takes a job file; its name comes last."""

WITH_SET = [name for name in COMMANDS if name != "schedule" and not name.startswith("cache")]
READING = ["run", "plan", "simulate", "backfill"]
"""Those that read what the job names."""


def refused(result: Any, *, says: str) -> None:
    """Exit code 2, nothing on stdout, and one line besides what a run says about itself."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("tiny: ", "tiny ", "job: "))]
    assert (result.code, result.stdout) == (2, ""), result.stderr
    assert len(lines) == 1 and lines[0].startswith("batchllm: ") and says in lines[0], result.stderr


@pytest.fixture
def job(write_job: WriteJob, tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    return write_job(tmp_path, [{"text": "one"}, {"text": "two"}])


JOB_FILES: dict[str, tuple[str, str]] = {
    "missing": ("none.yaml", "none.yaml: there is no such job file"),
    "a folder": (".", ".: the job file cannot be read: Is a directory"),
    "below a file": ("file/job.yaml", "file/job.yaml: the job file cannot be read: Not a directory"),
    "empty name": ("", "must not be empty"),
    "long name": ("x" * 300, "must be made of names of at most 255 bytes, not 300"),
    "long path": ("a/" * 3000, "must have at most 4095 bytes, not 6000"),
    "no UTF-8 name": (os.fsdecode(b"\xff.yaml"), "must be Unicode text"),
    "no UTF-8": ("bytes.yaml", "bytes.yaml: the job file cannot be read: it is not UTF-8 text"),
    "a list": ("list.yaml", "list.yaml: a job file is a mapping of keys"),
    "no YAML": ("broken.yaml", "broken.yaml:1: not valid YAML"),
    "unknown key": ("unknown.yaml", "unknown.yaml:1: nam: unknown key; the nearest known key is name"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_file_that_is_none_is_named(commands: Any, tmp_path: Path, job: Path, command: str) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "list.yaml").write_text("[1]")
    (tmp_path / "broken.yaml").write_text("name: {")
    (tmp_path / "unknown.yaml").write_text("nam: x")
    for name, says in JOB_FILES.values():
        refused(commands.run(*COMMANDS[command], name, folder=tmp_path), says=says)


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_usage_is_one_line_that_says_where_help_is(
    commands: Any, tmp_path: Path, job: Path, command: str
) -> None:
    name = COMMANDS[command][0] + (f" {COMMANDS[command][1]}" if command.startswith("cache") else "")
    refused(commands.run(*COMMANDS[command], job, "--nope", folder=tmp_path), says=f"(see batchllm {name} --help)")


JOB_VALUES: dict[str, str] = {
    'output.path="a\\0b"': "output.path: must not hold a NUL character",
    'output.path="\\ud800"': "output.path: must be Unicode text",
    "output.path=" + "x" * 300: "output.path: must be made of names of at most 255 bytes, not 300",
    "output.path=" + "x/" * 3000: "output.path: must have at most 4095 bytes, not 6000",
    "output.path=~nobody-of-this-name/x": "output.path: ~nobody-of-this-name/x begins with a user who is not known here",
    'input={path: "a\\0b"}': "input.path: must not hold a NUL character",
    'input={openai_batch: "a\\0b"}': "input.openai_batch: must not hold a NUL character",
    "input={sql: \"select 'a\\0'\"}": "input.sql: must not hold a NUL character",
    'input.keep=["\\ud800"]': "input.keep.0: must be Unicode text",
    'model="a\\0b"': "model: must not hold a NUL character",
    "model=" + "m" * 300: "model: must be made of names of at most 255 bytes",
    'name="a\\nb"': "name: must be made of printable characters",
    "name=" + "n" * 300: "name: must have at most 200 characters",
    'prompt.template="\\ud800"': "prompt.template: not a valid template: its character 1 is no Unicode text",
    'prompt.template="{{"': "prompt.template: not a valid template, at its line 1",
    "prompt.template=\"{% include 'x' %}\"": "there are no others that it could include",
    'on_success=["a\\0"]': "on_success.0: must not hold a NUL character",
    'sampling.stop=["\\ud800"]': "sampling.stop.0: must be Unicode text",
    "sampling.temperature=1e999": "sampling.temperature: must be a finite number",
    'output.schema={const: "\\ud800"}': "output.schema: must be Unicode text",
    'output.schema="a\\0"': "output.schema: must not hold a NUL character",
    "output.schema=none.json": "none.json",
    "output.regex=a{": "output.regex: ",
    r"output.regex='[^\x00-\x{10FFFF}]'": "output.regex: cannot be kept to: no text fits",
    'engine.kv.disk={path: "a\\0"}': "engine.kv.disk.path: must not hold a NUL character",
    "engine": "--set engine: write it as key.key=value",
    "seed=" + "9" * 30: "seed: must be below",
    "seed=0x" + "f" * 5000: "seed: must be below 9223372036854775808, not a number without end",
}


@pytest.mark.parametrize("command", WITH_SET)
def test_a_value_of_the_job_that_is_wrong_is_named(commands: Any, tmp_path: Path, job: Path, command: str) -> None:
    for override, says in JOB_VALUES.items():
        refused(commands.run(*COMMANDS[command], job, "--set", override, folder=tmp_path), says=says)


NAMED_BY_THE_JOB: dict[str, str] = {
    "input.path=none.parquet": "none.parquet: there is no such file or folder",
    "input.path=none-*.parquet": "no file matches",
    "input.path=file": "file: cannot be read as Parquet",
    "input.path=rows.json": "all others as Parquet",
    "input.path=/dev/null": "input.path: /dev/null: ",
    "input.path=open.csv": "open.csv, line 3: a quote is opened and not closed",
    "input={sql: selec}": "input.sql: Parser Error",
    "input={sql: \"select * from 'none.csv'\"}": "none.csv",
    "input.keep=[title]": "the input has no column 'title'",
    'prompt.template="{{ txt }}"': "names column 'txt', which the input lacks",
    "prompt={messages: none}": "prompt.messages: the input has no column 'none'",
    "sampling.temperature={column: heat}": "the input has no column 'heat'",
    "sampling.logit_bias={7: 1, 258: 1}": (
        "sampling.logit_bias: token 258 is beyond the model's vocabulary of 258; name ids from 0 to 257"
    ),
    "sampling.stop_token_ids=[257, 100000]": (
        "sampling.stop_token_ids: token 100000 is beyond the model's vocabulary of 258; name ids from 0 to 257"
    ),
    "output.choice={column: none}": "output.choice: the input has no column 'none'",
    "model=none": "model 'none': no such file or folder",
    "model=file": "file: not a .gguf file and not a folder",
    "model=.": "no config.json in it",
    "model=broken.gguf": "broken.gguf: not a whole GGUF file",
}


@pytest.mark.parametrize("command", READING)
def test_what_the_job_names_and_cannot_be_read_is_named(commands: Any, tmp_path: Path, job: Path, command: str) -> None:
    (tmp_path / "open.csv").write_text('text,n\nfine,1\n"open,2\nthird,3\n')
    (tmp_path / "rows.json").write_text('[{"text": "one"}]')
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03")
    for override, says in NAMED_BY_THE_JOB.items():
        refused(commands.run(*COMMANDS[command], job, "--set", override, folder=tmp_path), says=says)


OUTPUTS = {
    "output.path=file": "file: the output folder cannot be made: ",
    "output.path=file/below": "file/below: the output folder cannot be made: Not a directory",
    "output.path=.": "holds rows.parquet, which is no part of a run",
    "engine.kv={disk: {path: file}}": "engine.kv.disk",
    "engine.kv.device=100": "hold no block of",
}


def test_a_place_of_output_that_cannot_be_it_is_named(commands: Any, tmp_path: Path, job: Path) -> None:
    for override, says in OUTPUTS.items():
        refused(commands.run("run", job, "--set", override, folder=tmp_path), says=says)
    assert not list(tmp_path.glob("**/part-*"))


OUT = ("--set", "output.path=out")
OWN: list[tuple[list[str], str]] = [
    (["run", "JOB", "--summary", ""], "'--summary': '' must not be empty"),
    (["run", "JOB", "--summary", "file/s.json"], "file/s.json: cannot be written"),
    (["run", "JOB", "--metrics", "."], "'--metrics'"),
    (["run", "JOB", "--summary", "job.yaml"], "--summary job.yaml is the job file too"),
    (["run", "JOB", "--summary", "s", "--metrics", "./s"], "--metrics s is --summary too"),
    (["run", "JOB", "--summary", "pipe"], "'pipe' is a device or a pipe"),
    (["run", "JOB", "--metrics", "/dev/stdout"], "'/dev/stdout' is a device or a pipe"),
    (["run", "JOB", "--deadline", "noon"], "--deadline noon: write a time"),
    (["run", "JOB", "--max-error-rate", "nan"], "--max-error-rate nan"),
    (["run", "JOB", "--date", "2026-13-01"], "'--date'"),
    (["run", "JOB", "--limit", "0"], "'--limit'"),
    (["run", "JOB", "JOB"], "unexpected extra argument"),
    (["plan", "JOB", "--analyze"], "records no run"),
    (["report", "JOB"], "records no run"),
    (["report", "JOB", "--run", "none"], "records no run 'none'"),
    (["report", "JOB", "--text", "--json"], "choose one"),
    (["query", "selec", "JOB"], "query: Parser Error"),
    (["query", "select 1; select 2", "JOB"], "one SQL statement"),
    (["query", "select 1 as a, 2 as a", "JOB"], "query: two columns are called 'a'"),
    (["query", "select 1 as a, 2 as a", "JOB", "--json"], "query: two columns are called 'a'"),
    (["query", "select 1", "JOB", "--output", "file/x"], "file/x: cannot be written"),
    (["query", "select 1", "JOB", "--format", "parquet"], "needs --output"),
    (["query", "select 1", "JOB", "--output", "job.yaml"], "--output job.yaml is the job file too"),
    (
        ["query", "select 1", "JOB", "--output", "out/a.parquet", *OUT],
        "--output out/a.parquet would stand among the files of",
    ),
    (
        ["query", "select 1", "JOB", "--output", "out/.runs/a/b.csv", *OUT],
        "among the files of runs in output.path; name a file",
    ),
    (["report", "JOB", "--output", "x/../out/page.parquet", *OUT], "--output x/../out/page.parquet would stand among"),
    (["run", "JOB", "--summary", "out/batch_errors.jsonl", *OUT], "--summary out/batch_errors.jsonl would stand among"),
    (["run", "JOB", "--metrics", "out/.lock", *OUT], "--metrics out/.lock would stand among the files of runs"),
    (
        ["schedule", "JOB", "--at", "02:30", "--log", "out/log.parquet", "--", *OUT],
        "--log out/log.parquet would stand among",
    ),
    (["report", "JOB", "--output", "pipe"], "'pipe' is a device or a pipe"),
    (["schedule", "JOB", "--at", "02:30", "--log", "job.yaml"], "--log job.yaml is the job file too"),
    (["schedule", "JOB"], "Missing option '--at'"),
    (["schedule", "JOB", "--at", "25:00"], "--at 25:00"),
    (["schedule", "JOB", "--at", "02:30", "--log", ""], "'--log': '' must not be empty"),
    (["schedule", "JOB", "--at", "02:30", "--log", "file/log"], "file/log: no run could write its log"),
    (
        ["schedule", "JOB", "--at", "02:30", "--", "--nope"],
        "batchllm: behind --: No such option '--nope' (see batchllm run --help)",
    ),
    (
        ["schedule", "JOB", "--at", "02:30", "--", "--limit", "x"],
        "behind --: Invalid value for '--limit': 'x' is not a valid integer range (see batchllm run --help)",
    ),
    (["schedule", "--remove", ""], "must not be empty"),
    (["backfill", "JOB", "--from", "2026-01-02", "--to", "2026-01-01"], "--to 2026-01-01 lies before"),
    (
        ["backfill", "JOB", "--from", "0001-01-01", "--to", "9999-12-31"],
        "3,652,059 dates; a backfill takes at most 1,000",
    ),
    (["doctor", "--spill-folder", "file"], "'--spill-folder'"),
    (["doctor", "--spill-folder", "file/below"], "file: is a file, and a folder is wanted"),
    (["doctor", "--spill-folder", "/dev/null"], "/dev/null: is a file, and a folder is wanted"),
    (["simulate"], "give a job file or --trace"),
    (["simulate", "JOB", "--pool", "9" * 400 + "%"], "--pool 999"),
    (["simulate", "JOB", "--rates", "file"], "--rates file"),
    (["simulate", "JOB", "--rates", "none"], "--rates none: No such file"),
    (["simulate", "--trace", "none"], "none: cannot be read: No such file"),
    (["simulate", "--trace", "."], ".: cannot be read: Is a directory"),
    (["simulate", "--trace", "/dev/zero"], "/dev/zero: cannot be read: its line 1 has more than 268,435,456 bytes"),
    (["simulate", "JOB", "--rates", "/dev/zero"], "--rates /dev/zero: it has more than 268,435,456 bytes"),
    (["run", "/dev/zero"], "/dev/zero: the job file cannot be read: it has more than 268,435,456 bytes"),
    (
        ["run", "JOB", "--set", "output.schema=/dev/zero"],
        "output.schema: /dev/zero cannot be read: it has more than 268,435,456 bytes",
    ),
    (
        ["run", "JOB", "--set", "output.regex=(a{1000}){1000}"],
        "output.regex: cannot be kept to: lexer error: too many expressions constructed; repeat less in it",
    ),
    (
        ["plan", "JOB", "--set", "output.schema={type: array, items: {type: integer}, minItems: 1000000}"],
        "output.schema: cannot be kept to: its shortest text has more than 1000000 characters; make minItems",
    ),
    (["cache", "ls"], "give a job file or --folder"),
    (["cache", "ls", "JOB"], "it has no engine.kv.disk"),
    (["cache", "ls", "--folder", "none"], "'none' does not exist"),
    (["cache", "verify", "--folder", "file"], "'file' is a file"),
    (["cache", "rm", "--folder", ""], "must not be empty"),
    (["models", "pull", "none"], "no embedded model is called 'none'"),
    (["schema", "x"], "unexpected extra argument"),
    (["fly"], "No such command 'fly'"),
]


@pytest.mark.parametrize(("arguments", "says"), OWN, ids=[" ".join(arguments)[:60] for arguments, _ in OWN])
def test_what_is_wrong_with_a_commands_own_options_is_named(
    commands: Any, tmp_path: Path, job: Path, arguments: list[str], says: str
) -> None:
    given = [str(job) if argument == "JOB" else argument for argument in arguments]
    refused(commands.run(*given, folder=tmp_path), says=says)


def test_a_spill_folder_that_is_a_file_is_named_by_every_command_that_reads_it(
    commands: Any, tmp_path: Path, write_job: WriteJob
) -> None:
    (tmp_path / "file").write_text("x")
    for path in ("file", "file/below"):
        job = write_job(tmp_path, [{"text": "one"}], engine={"kv": {"disk": {"path": path}}})
        for command in ("run", "plan", "backfill") + (
            ("cache ls", "cache verify", "cache rm") if path == "file" else ()
        ):
            refused(commands.run(*COMMANDS[command], job, folder=tmp_path), says=f"{tmp_path}/file")
        found = commands.run("doctor", job, "--json", folder=tmp_path)
        assert found.code == 1 and f"{tmp_path}/file: is a file, and a folder is wanted there" in found.stdout


HOSTILE_LINES: dict[str, bytes] = {
    "infinite": b'{"input_length": 1e999, "output_length": 1, "hash_ids": []}',
    "no number": b'{"input_length": NaN, "output_length": 1, "hash_ids": []}',
    "below 0": b'{"input_length": -1, "output_length": 1, "hash_ids": []}',
    "true": b'{"input_length": true, "output_length": 1, "hash_ids": []}',
    "of 100 digits": b'{"input_length": ' + b"9" * 100 + b', "output_length": 1, "hash_ids": []}',
    "of 5,000 digits": b'{"input_length": ' + b"9" * 5000 + b', "output_length": 1, "hash_ids": []}',
    "ids as text": b'{"input_length": 1, "output_length": 1, "hash_ids": "12"}',
    "an infinite id": b'{"input_length": 1, "output_length": 1, "hash_ids": [1e999]}',
    "an id twice": b'{"input_length": 1, "output_length": 1, "hash_ids": [7, 7]}',
    "deep": b"[" * 100_000,
    "no object": b"[]",
    "no UTF-8": b"\xff\xfe{}",
    "NUL": b"\0",
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_a_hostile_line_of_a_trace_or_of_rates_is_named(commands: Any, tmp_path: Path, job: Path, line: bytes) -> None:
    (tmp_path / "trace.jsonl").write_bytes(b'{"input_length": 600, "output_length": 1, "hash_ids": [1]}\n' + line)
    refused(commands.run("simulate", "--trace", "trace.jsonl", folder=tmp_path), says="trace.jsonl, line 2: ")
    (tmp_path / "rates.json").write_bytes(line)
    refused(commands.run("simulate", job, "--rates", "rates.json", folder=tmp_path), says="--rates rates.json: ")


@pytest.mark.parametrize("rate", ["1e999", "NaN", "0", "9" * 400, '"x"'])
def test_a_rate_that_is_no_number_above_0_is_refused(commands: Any, tmp_path: Path, job: Path, rate: str) -> None:
    (tmp_path / "rates.json").write_text(f'{{"disk_read": {rate}}}')
    refused(commands.run("simulate", job, "--rates", "rates.json", folder=tmp_path), says="--rates rates.json: ")


def test_an_environment_that_is_wrong_is_named(commands: Any, tmp_path: Path, job: Path) -> None:
    for value, says in (
        ("~nobody-of-this-name", "begins with a user"),
        ("file", "Not a directory"),
        ("x" * 300, "too long"),
    ):
        result = commands.run("models", "list", folder=tmp_path, environment={"BATCHLLM_HOME": value})
        refused(result, says=says)
        assert value in result.stderr


def test_a_command_in_a_folder_that_is_gone_says_so(commands: Any, tmp_path: Path, job: Path) -> None:
    for command in [*COMMANDS.values(), ["models", "list"], ["schema"]]:
        arguments = command if command[0] in ("models", "schema") else [*command, str(job)]
        gone = tmp_path / "gone"
        gone.mkdir()
        result = commands.run(*arguments, folder=gone, remove_folder=True)
        refused(result, says="the working folder is no longer there; change to another one")


def test_the_exit_codes_of_the_readme_are_those_of_the_errors() -> None:
    from batchllm import errors

    codes = {
        kind.__name__: kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.BatchLLMError)
    }
    wrong = {"WrongInputError", "JobError", "InputError", "ModelError", "FolderError"}
    assert {name for name, code in codes.items() if code == 2} == wrong
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    for code in {*codes.values(), 0, 3}:
        assert f"\n| {code} | " in readme
    assert set(codes.values()) == {1, 2, 4, 130}
