"""What every measured engine speaks: a child process that loads, says so, and then runs workloads by name.

The process prints one JSON line when it is loaded (`{"ready": true, "load_s": …, "engine": …, "settings": {…}}`), then reads names of
workloads from standard input, a line each, and answers each with one JSON line:

    {"workload": "W1", "seconds": …, "output_tokens": [per row], "first_tokens": [per row], "peak_rss_bytes": …, "first_token_s": …}

`seconds` run from the first prompt handed over to the last token; reading the Parquet file is not in them. Standard output belongs to
these lines alone: what libraries print there goes to standard error. This file runs in the peers' environments and imports nothing
of batchllm.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True, slots=True)
class Prompts:
    """A workload as engines take it, or its first `limit` rows; `path` is its file, with the prompts as text in column `text`."""

    name: str
    path: Path
    token_ids: list[list[int]]
    max_tokens: list[int]
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a workload gave: token ids per row in the rows' order, and times in seconds from its start.

    `details`: figures of the engine's own, as plain JSON.
    """

    seconds: float
    outputs: Sequence[Sequence[int]]
    first_token_s: float | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


RunWorkload = Callable[[Prompts], Outcome]


def read_prompts(path: Path, *, limit: int | None = None) -> Prompts:
    """The workload in the Parquet file `path`, or its first `limit` rows."""
    table = pq.read_table(path).slice(0, limit)
    return Prompts(
        name=path.stem,
        path=path,
        token_ids=table.column("token_ids").to_pylist(),
        max_tokens=table.column("max_tokens").to_pylist(),
        limit=limit,
    )


def serve(engine: str, settings_type: type[SettingsT], load: Callable[[SettingsT, Path], RunWorkload]) -> None:
    """Runs an engine's process: `load(settings, model)` gives the function that runs a workload.

    `settings_type` is a dataclass with a default for each setting; `--set name=value` changes one.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="folder that export_model.py wrote")
    parser.add_argument("--workloads", type=Path, required=True, help="folder that workloads.py wrote")
    parser.add_argument("--limit", type=int, default=None, help="the first rows of each workload only")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    options = parser.parse_args()
    settings = parse_settings(settings_type, options.set)
    with _PrivateStdout() as say:
        started_at = time.monotonic()
        run = load(settings, options.model)
        load_s = time.monotonic() - started_at
        say({"ready": True, "engine": engine, "load_s": load_s, "settings": dataclasses.asdict(settings)})  # type: ignore[call-overload]
        for line in sys.stdin:
            prompts = read_prompts(options.workloads / f"{line.strip()}.parquet", limit=options.limit)
            _forget_peak()
            outcome = run(prompts)
            say(
                {
                    "workload": prompts.name,
                    "seconds": outcome.seconds,
                    "output_tokens": [len(output) for output in outcome.outputs],
                    "first_tokens": [int(output[0]) if len(output) else -1 for output in outcome.outputs],
                    "peak_rss_bytes": _peak_rss_bytes(),
                    "first_token_s": outcome.first_token_s,
                    "details": outcome.details,
                }
            )


def parse_settings(settings_type: type[SettingsT], changes: Sequence[str]) -> SettingsT:
    """`settings_type` with `NAME=VALUE` changes; a value is read as the type of the default. Exits on an unknown name."""
    settings = settings_type()
    fields = {field.name for field in dataclasses.fields(settings_type)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in fields:
            sys.exit(f"--set {name}: unknown; known: {', '.join(sorted(fields))}")
        default = getattr(settings, name)
        values[name] = text == "true" if isinstance(default, bool) else type(default)(text)
    return settings_type(**values)


class _PrivateStdout:
    """Standard output for this program's lines alone: other writers, those in C too, get standard error."""

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        self._stream = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

        def say(message: dict[str, Any]) -> None:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()

        return say

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def _forget_peak() -> None:
    """The kernel's high-water mark of this process starts again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_rss_bytes() -> int:
    """The most that this process and its children had resident since the mark was reset; a child's mark is its whole life's."""
    return sum(_high_water_bytes(pid) for pid in _family(os.getpid()))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids = children.read_text().split()
        except FileNotFoundError:
            continue
        for child in pids:
            yield from _family(int(child))


def _high_water_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
