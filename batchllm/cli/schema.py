"""`batchllm schema`: the JSON Schema of job files, for editors."""

from __future__ import annotations

import json

import click

from batchllm.cli.saying import put


@click.command()
def schema() -> None:
    """Print the JSON Schema of a job file, which lets an editor complete and check job files."""
    from batchllm.job_schema import job_schema

    put(json.dumps(job_schema(), indent=2, ensure_ascii=False))
