"""Standard output that takes nothing: a full disk is one line and an exit code, a reader that has seen enough is nothing at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

OUTPUTS = [
    ["--help"],
    ["--version"],
    ["run", "--help"],
    ["run", "JOB", "--date", "2026-11-29"],
    ["run", "JOB", "--date", "2026-11-29", "--json"],
    ["plan", "JOB"],
    ["plan", "JOB", "--json"],
    ["report", "JOB", "--date", "2026-11-29"],
    ["report", "JOB", "--date", "2026-11-29", "--text"],
    ["report", "JOB", "--date", "2026-11-29", "--json"],
    ["query", "select 1", "JOB"],
    ["query", "select 1", "JOB", "--format", "csv"],
    ["query", "select 1", "JOB", "--json"],
    ["query", "--views", "JOB"],
    ["schedule", "JOB", "--at", "02:30"],
    ["backfill", "JOB", "--from", "2026-11-28", "--to", "2026-11-29"],
    ["backfill", "JOB", "--from", "2026-11-28", "--to", "2026-11-29", "--json"],
    ["doctor"],
    ["simulate", "JOB"],
    ["cache", "ls", "--folder", "."],
    ["cache", "verify", "--folder", ".", "--json"],
    ["cache", "rm", "--folder", "."],
    ["models", "list"],
    ["schema"],
]


@pytest.mark.parametrize("arguments", OUTPUTS, ids=" ".join)
def test_a_full_disk_is_one_line_and_an_exit_code(
    commands: Any, finished_job: Path, tmp_path: Path, arguments: list[str]
) -> None:
    given = [str(finished_job) if argument == "JOB" else argument for argument in arguments]
    result = commands.run(*given, folder=tmp_path, stdout="/dev/full")
    lines = [line for line in result.stderr.splitlines() if line.startswith("batchllm: ")]
    assert result.code == 1 and "Traceback" not in result.stderr and "Exception" not in result.stderr, result.stderr
    assert len(lines) == 1 and lines[0].endswith(": No space left on device"), result.stderr


def test_a_reader_that_has_gone_ends_nothing_and_changes_no_exit_code(finished_job: Path) -> None:
    """The pipe is closed before the command writes; interpreters of their own, whose last flush would complain."""
    for arguments, code in (
        (["query", "select * from range(200000)", finished_job, "--format", "csv"], 0),
        (["run", finished_job, "--date", "2026-11-29"], 3),
    ):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "batchllm", *map(str, arguments)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        )
        os.close(writer)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("tiny: ")]
        assert (done.returncode, lines) == (code, []), done.stderr
