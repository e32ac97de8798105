"""`batchllm cache`: the blocks that `engine.kv.persist` keeps between runs."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from batchllm.cli.paths import GivenFolder, GivenPath
from batchllm.cli.saying import put
from batchllm.errors import FolderError, JobError, RunLockedError


def _place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where the cache files lie: a job file's `engine.kv.disk.path`, or a folder."""
    command = click.option("--folder", type=GivenFolder(), help="The folder, instead of a job file.")(command)
    command = click.argument("job_file", required=False, type=GivenPath())(command)
    return click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")(command)


def _folder(job_file: Path | None, folder: Path | None) -> Path:
    from batchllm.job import load_job

    if (job_file is None) == (folder is None):
        raise click.UsageError("give a job file or --folder, one of them")
    if folder is not None:
        return folder
    assert job_file is not None
    disk = load_job(job_file).engine.kv.disk
    if disk is None:
        raise JobError(f"{job_file}: keeps nothing: it has no engine.kv.disk")
    path = Path(disk.path)
    if path.exists() and not path.is_dir():
        raise FolderError(f"{job_file}: engine.kv.disk.path: {path}: is a file, and a folder is wanted there")
    return path


@click.group()
def cache() -> None:
    """KV blocks kept between runs: list, verify, remove."""


@cache.command("ls")
@_place
def list_files(job_file: Path | None, folder: Path | None, as_json: bool) -> None:
    """List the cache files: blocks, size, age, and whether a run has them."""
    from batchllm.storage.cache import CacheFile, list_caches

    def as_row(found: CacheFile) -> dict[str, Any]:
        row = dataclasses.asdict(found) | {"path": str(found.path)}
        superblock = row.pop("superblock")
        row["fingerprint"] = None if superblock is None else superblock["fingerprint"].hex()
        row["block_bytes"] = None if superblock is None else superblock["block_bytes"]
        return row

    rows = [as_row(found) for found in list_caches(_folder(job_file, folder))]
    if as_json:
        put(json.dumps(rows))
        return
    for row in rows:
        state = "in use" if row["is_in_use"] else "damaged" if row["fingerprint"] is None else "idle"
        put(
            f"{row['path']}  {state}  {row['num_blocks']:,} of {row['num_slots']:,} blocks  {row['size_bytes'] / 1e6:,.1f} MB  "
            f"oldest {_time(row['oldest_s'])}, newest {_time(row['newest_s'])}"
        )
    if not rows:
        put("no cache files")


@cache.command()
@_place
@click.pass_context
def verify(context: click.Context, job_file: Path | None, folder: Path | None, as_json: bool) -> None:
    """Read and check every block. Exit code 3 where some are damaged or a file is; a run computes those again."""
    from batchllm.storage.cache import list_caches, verify_cache
    from batchllm.storage.errors import CacheInUseError, StorageError

    rows: list[dict[str, Any]] = []
    for found in list_caches(_folder(job_file, folder)):
        row: dict[str, Any] = {"path": str(found.path), "state": "good", "num_good": 0, "num_free": 0, "damaged": {}}
        try:
            check = verify_cache(found.path)
            damaged = {cause.value: count for cause, count in check.damaged.items()}
            row |= {"num_good": check.num_good, "num_free": check.num_free, "damaged": damaged}
            row["state"] = "damaged" if damaged else "good"
        except CacheInUseError:
            row["state"] = "in use"
        except StorageError:
            row["state"] = "no cache file"
        rows.append(row)
    if as_json:
        put(json.dumps(rows))
    else:
        for row in rows:
            causes = "".join(f", {count:,} {cause}" for cause, count in row["damaged"].items())
            put(f"{row['path']}  {row['state']}  {row['num_good']:,} good, {row['num_free']:,} free{causes}")
        if not rows:
            put("no cache files")
    context.exit(3 if any(row["state"] in ("damaged", "no cache file") for row in rows) else 0)


@cache.command()
@_place
def rm(job_file: Path | None, folder: Path | None, as_json: bool) -> None:
    """Remove the cache files that no run has. Exit code 4 where a run has one."""
    from batchllm.storage.cache import list_caches, remove_cache
    from batchllm.storage.errors import CacheInUseError

    removed: list[str] = []
    in_use: list[str] = []
    for found in list_caches(_folder(job_file, folder)):
        try:
            if remove_cache(found.path):
                removed.append(str(found.path))
        except CacheInUseError:
            in_use.append(str(found.path))
    if as_json:
        put(json.dumps(removed))
    else:
        for path in removed:
            put(f"removed {path}")
        if not removed and not in_use:
            put("no cache files")
    if in_use:
        raise RunLockedError(f"in use by a run, not removed: {', '.join(in_use)}")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
