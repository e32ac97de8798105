"""The JSON Schema of job files, made from the models that check them."""

from __future__ import annotations

from typing import Any

from batchllm.job import Job


def job_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of a whole job file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "batchllm job file",
        **{key: value for key, value in Job.model_json_schema(mode="validation").items() if key != "title"},
    }
