"""`batchllm models`: fetch and list the models that this program knows by name."""

from __future__ import annotations

import json

import click

from batchllm.cli.saying import put


@click.group()
def models() -> None:
    """Models known by name, and where they are kept."""


@models.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetch the embedded model NAME into the cache folder, and print its path."""
    from batchllm.models.embedded import pull as pull_model
    from batchllm.models.registry import cache_home

    put(str(pull_model(name, cache_home())))


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_models(*, as_json: bool) -> None:
    """List the embedded models: name, whether it is here, size, path."""
    from batchllm.models.registry import cache_home, list_embedded

    rows = list_embedded(cache_home())
    if as_json:
        put(json.dumps(rows))
        return
    for row in rows:
        put(f"{row['name']}  {'here' if row['present'] else 'not fetched'}  {row['num_bytes']} bytes  {row['path']}")
