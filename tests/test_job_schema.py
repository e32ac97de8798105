"""The JSON Schema of job files agrees with the models that check them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from batchllm.errors import JobError
from batchllm.job import load_job
from batchllm.job_schema import job_schema

REPOSITORY = Path(__file__).resolve().parent.parent
GOOD: dict[str, Any] = {
    "name": "t",
    "model": "m",
    "input": {"path": "x.parquet"},
    "prompt": {"template": "x"},
    "output": {"path": "out"},
}
VALIDATOR = jsonschema.Draft202012Validator(job_schema())


def test_the_schema_is_a_valid_one_and_refuses_unknown_keys_at_every_depth() -> None:
    jsonschema.Draft202012Validator.check_schema(job_schema())
    for section in (None, "input", "prompt", "sampling", "output", "engine"):
        job = json.loads(json.dumps(GOOD))
        (job if section is None else job.setdefault(section, {}))["surprise"] = 1
        assert not VALIDATOR.is_valid(job), section


@pytest.mark.parametrize("path", sorted((REPOSITORY / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_sample_job_fits(path: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(path.read_text()))
    load_job(path, date=datetime.date(2026, 11, 29))


@pytest.mark.parametrize(
    ("section", "values", "fits"),
    [
        ("engine", {"kv": {"device": "2GiB"}}, True),
        ("engine", {"kv": {"device": 1 << 30}}, True),
        ("engine", {"kv": {"device": "much"}}, False),
        ("engine", {"max_sequences": "auto"}, True),
        ("engine", {"max_sequences": 8}, True),
        ("engine", {"max_sequences": 0}, False),
        ("engine", {"device": "tpu"}, False),
        ("sampling", {"stop": "\n"}, True),
        ("sampling", {"stop": ["a", "b"]}, True),
        ("sampling", {"stop": [""]}, False),
        ("sampling", {"logit_bias": {"5": -3}}, True),
        ("sampling", {"logit_bias": {"five": -3}}, False),
        ("sampling", {"temperature": {"column": "t"}}, True),
        ("sampling", {"temperature": -1}, False),
        ("input", {"sql": "select 1"}, False),
        ("input", {"keep": ["a"]}, True),
        ("on_success", ["touch", "done"], True),
        ("on_failure", "touch done", False),
        ("command_timeout_s", 0, False),
    ],
)
def test_schema_and_models_agree(tmp_path: Path, section: str, values: object, fits: bool) -> None:
    merged = {**GOOD.get(section, {}), **values} if isinstance(values, dict) else values
    job = {**GOOD, section: merged}
    assert VALIDATOR.is_valid(job) == fits
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    if fits:
        load_job(tmp_path / "job.yaml")
    else:
        with pytest.raises(JobError):
            load_job(tmp_path / "job.yaml")


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    from batchllm.cli.main import cli

    cli.main(["schema"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == job_schema()


def test_a_job_over_a_batch_file_needs_no_prompt(tmp_path: Path) -> None:
    job = {key: value for key, value in GOOD.items() if key != "prompt"} | {"input": {"openai_batch": "r.jsonl"}}
    VALIDATOR.validate(job)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert load_job(tmp_path / "job.yaml").input.openai_batch == str(tmp_path / "r.jsonl")
