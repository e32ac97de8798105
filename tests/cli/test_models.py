"""`batchllm models`."""

from __future__ import annotations

import json

from click.testing import CliRunner

from batchllm.cli.models import models
from batchllm.models.source import ModelSource


def test_pull_prints_the_path_of_the_model(embedded_model: ModelSource) -> None:
    result = CliRunner().invoke(models, ["pull", "smollm2-135m"])
    assert result.exit_code == 0
    assert result.stdout == f"{embedded_model.path}\n"


def test_list_names_the_model_and_says_whether_it_is_here(embedded_model: ModelSource) -> None:
    result = CliRunner().invoke(models, ["list", "--json"])
    (row,) = json.loads(result.stdout)
    assert row == {
        "name": "smollm2-135m",
        "present": True,
        "num_bytes": 98_362_432,
        "path": str(embedded_model.path),
    }
    assert "smollm2-135m  here  98362432 bytes" in CliRunner().invoke(models, ["list"]).stdout


def test_an_unknown_name_is_a_model_error() -> None:
    result = CliRunner().invoke(models, ["pull", "nothing"])
    assert "no embedded model is called 'nothing'" in str(result.exception)
