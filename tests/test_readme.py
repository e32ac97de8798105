"""The README is run: its commands, its job file, its SQL; its tables are compared with the code."""

from __future__ import annotations

import datetime
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
import duckdb
import pytest
from pydantic import BaseModel

from batchllm import errors
from batchllm.cli.main import cli
from batchllm.job import Job, load_job

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
TODAY = datetime.date(2026, 11, 29)

CODE_LINES = [
    line.strip() for line in re.sub(r"```.*?```", "", README, flags=re.DOTALL).splitlines() if line[:4] == " " * 4
]
COMMANDS = [line for line in CODE_LINES if line.startswith("batchllm ")]


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def leaf_commands(group: click.Group, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    found: dict[tuple[str, ...], click.Command] = {}
    for name, command in group.commands.items():
        found |= leaf_commands(command, (*at, name)) if isinstance(command, click.Group) else {(*at, name): command}
    return found


def command_of(line: str) -> tuple[tuple[str, ...], click.Command, list[str]]:
    """A line of the README as (name, command, arguments)."""
    words = tuple(shlex.split(line)[1:])
    known = leaf_commands(cli)
    for length in (1, 2):
        if words[:length] in known:
            return words[:length], known[words[:length]], list(words[length:])
    raise AssertionError(f"the README names a command that is not there: {line}")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the jobs and their data, as after `make run`."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(REPOSITORY / "jobs", folder / "jobs", ignore=shutil.ignore_patterns("data", "__pycache__"))
    script = [sys.executable, str(folder / "jobs" / "make_data.py")]
    subprocess.run(script, check=True, capture_output=True, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def long_context_model(make_chat_model: Callable[..., Path]) -> Path:
    """A byte of the sample texts is about a token for it, so its context must be long."""
    return make_chat_model(max_context=16384)


def test_every_code_line_is_a_command_or_a_make_target() -> None:
    assert len(COMMANDS) >= 4
    makefile = (REPOSITORY / "Makefile").read_text()
    for line in CODE_LINES:
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", makefile, flags=re.MULTILINE), line
        else:
            assert line in COMMANDS, line


def run_summarise(commands: Any, project: Path, model: Path) -> None:
    """The sample job; where it is done already, at once."""
    settings = ["--set", f"model={model}", "--set", "engine.dtype=fp32", "--set", "sampling.max_tokens=4"]
    result = commands.run("run", "jobs/summarise.yaml", *settings, "--date", TODAY.isoformat(), folder=project)
    assert result.code == 0, result.stderr


@pytest.mark.parametrize("line", list(dict.fromkeys(COMMANDS)))
def test_every_command_runs(commands: Any, project: Path, long_context_model: Path, line: str) -> None:
    name, command, arguments = command_of(line)
    options = {option for parameter in command.params for option in parameter.opts}
    # The embedded model would take minutes; the command is the README's, and the model and the day are ours.
    if "--set" in options and name[0] != "query":
        arguments += ["--set", f"model={long_context_model}", "--set", "engine.dtype=fp32"]
        if "sampling.max_tokens" not in line:
            arguments += ["--set", "sampling.max_tokens=4"]
    if "--date" in options and "--date" not in arguments:
        arguments += ["--date", TODAY.isoformat()]
    if name[0] != "run" and "jobs/summarise.yaml" in arguments:
        # In the README the job was run before; tests may run apart, in any order.
        run_summarise(commands, project, long_context_model)
    result = commands.run(*name, *arguments, folder=project)
    assert result.code == 0, f"{result.stderr}\n{result.stdout}"
    assert result.stdout.strip() or result.stderr.strip()


def test_the_sql_reads_what_a_run_wrote(
    commands: Any, project: Path, long_context_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql, runs_and_steps = fenced("sql")
    run_summarise(commands, project, long_context_model)
    monkeypatch.chdir(project)
    for statement in runs_and_steps.strip().splitlines():
        assert duckdb.connect().sql(statement).to_arrow_table().num_rows > 0, statement
    table = duckdb.connect().sql(sql).to_arrow_table()
    assert table.num_rows > 40
    assert table["row_index"].to_pylist() == list(range(table.num_rows))
    named = set(
        re.findall(r"`([a-z0-9_]+)`", README[README.index("## Results") : README.index("Parts are not in input")])
    )
    assert set(table.schema.names) - {"title"} <= named


def test_the_job_file_loads_and_says_what_the_sample_job_says(tmp_path: Path) -> None:
    text = fenced("yaml")[0]
    (tmp_path / "job.yaml").write_text(text)
    job, sample = load_job(tmp_path / "job.yaml", date=TODAY), load_job(REPOSITORY / "jobs/summarise.yaml", date=TODAY)
    assert job.fingerprint_parts() == sample.fingerprint_parts()
    for line in re.findall(r"^  # (\w+: \w+) ", text, flags=re.MULTILINE):
        (tmp_path / "other.yaml").write_text(text.replace("  template: |", f"  {line}\n  template: |"))
        # Both ways to write a prompt at once are refused as such: the key is known.
        if line.startswith("messages"):
            with pytest.raises(errors.JobError, match="exactly one of template and messages"):
                load_job(tmp_path / "other.yaml")


def test_the_exit_codes_are_those_of_the_errors() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)}
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.BatchLLMError)
    ]
    assert listed == {0, 3} | {kind.exit_code for kind in kinds}


def test_every_option_that_is_named_is_in_the_help_of_its_command() -> None:
    for line in COMMANDS:
        _, command, arguments = command_of(line)
        text = command.get_help(click.Context(command))
        if "--" in arguments:
            # What stands behind it is for the runs that the command starts.
            text += cli.commands["run"].get_help(click.Context(cli.commands["run"]))
            arguments.remove("--")
        for argument in arguments:
            assert not argument.startswith("--") or f"{argument} " in text, f"{argument} in {line}"
    texts = [command.get_help(click.Context(command)) for command in leaf_commands(cli).values()]
    for option in re.findall(r"`(--[a-z-]+)", README):
        assert any(f"{option} " in text for text in texts), option


def job_keys(section: type[BaseModel], at: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        name = field.alias or name
        keys += job_keys(below[0], f"{at}{name}.") if len(below) == 1 else [f"{at}{name}"]
    return keys


def test_every_key_of_a_job_is_explained() -> None:
    keys = job_keys(Job)
    assert "engine.kv.device" in keys and "sampling.top_k" in keys
    # A stage has keys of the job, and a few more.
    for key in dict.fromkeys(key.removeprefix("stages.") for key in keys):
        name = key.rsplit(".", 1)[-1]
        assert (
            f"`{key}`" in README or f"`{name}`" in README or re.search(rf"(^ *(# )?|{{){name}: ", README, re.MULTILINE)
        ), key


def test_every_environment_variable_is_explained_and_the_table_has_no_other() -> None:
    listed = set(re.findall(r"^\| `(BATCHLLM_[A-Z_]+)`", README, flags=re.MULTILINE))
    used: set[str] = set()
    for folder in ("batchllm", "kernels", "storage"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            used |= set(re.findall(r'"(BATCHLLM_[A-Z_]+)"', path.read_text()))
    assert listed <= used
    # Those that a run gives to the commands it starts are named in the text.
    assert [name for name in sorted(used) if f"`{name}`" not in README] == []
