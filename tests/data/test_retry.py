"""Taking error rows out of visible parts: every other row stays, whatever happens, and each is there once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.data.outputs import OutputFolder
from batchllm.data.parts import drop_error_rows, part_name, read_fingerprint, visible_parts, write_part
from batchllm.data.schema import completion_schema

SCHEMA = completion_schema([pa.field("id", pa.string())], with_token_ids=True, with_logprobs=True)
FINGERPRINT = {"model": "m", "date": "2026-11-29"}
KILLER = """\
import os, signal, sys
from pathlib import Path
from batchllm.data.outputs import OutputFolder
from batchllm.data import parts

folder, step = Path(sys.argv[1]), 0
while True:
    step += 1
    child = os.fork()
    if child == 0:
        events = 0
        def count(event, arguments):
            global events
            # Imports open files too; what matters are the calls on the output folder.
            is_ours = any(str(folder) in str(argument) for argument in arguments)
            if event == "os.fsync" or is_ours and (event == "open" or event.startswith("os.")):
                events += 1
                if events == step:
                    os.kill(os.getpid(), signal.SIGKILL)
        sync = os.fsync
        def counted_sync(fd):
            count("os.fsync", ())
            sync(fd)
            count("os.fsync", ())
        os.fsync = counted_sync
        with OutputFolder(folder / f"killed-{step}") as output:
            sys.addaudithook(count)
            output.drop_error_rows(below=1000)
            sys.stdout.flush()
            events = -1000000
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert status == 0
        print(step)
        break
"""


def make_part(folder: Path, number: int, rows: list[tuple[int, int, bool]]) -> None:
    """`rows`: row index, sample index, whether it carries an error."""
    values = [
        {
            **dict.fromkeys(SCHEMA.names),
            "row_index": row,
            "sample_index": sample,
            "completion": None if failed else f"text {row} {sample}",
            "error": f"row {row} failed" if failed else None,
            "finish_reason": "error" if failed else "eos",
            "run_id": "r",
            "model": "m",
        }
        for row, sample, failed in rows
    ]
    write_part(
        pa.Table.from_pylist(values, SCHEMA), folder / part_name(number, run_id="r"), fingerprint=dict(FINGERPRINT)
    )


def read(folder: Path) -> list[tuple[int, int, bool]]:
    found = []
    for part in visible_parts(folder):
        assert read_fingerprint(part) == FINGERPRINT
        table = pq.read_table(part)
        assert table.schema.equals(SCHEMA)
        found += [(row["row_index"], row["sample_index"], row["error"] is not None) for row in table.to_pylist()]
    return sorted(found)


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=6), max_size=4),
    below=st.integers(0, 24),
)
def test_exactly_the_failed_rows_go_with_all_their_samples(parts: list[list[list[bool]]], below: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, row, everything = Path(name), 0, []
        for number, part in enumerate(parts):
            rows = []
            for samples in part:
                rows += [(row, sample, failed) for sample, failed in enumerate(samples)]
                row += 1
            make_part(folder, number, rows)
            everything += rows
        failed = {index for index, _, has_error in everything if has_error and index < below}
        assert sum(drop_error_rows(part, below=below) for part in visible_parts(folder)) == len(failed)
        assert read(folder) == [one for one in everything if one[0] not in failed]
        assert sum(drop_error_rows(part, below=below) for part in visible_parts(folder)) == 0


def test_parts_without_errors_are_not_touched(tmp_path: Path) -> None:
    make_part(tmp_path, 0, [(0, 0, False)])
    before = os.stat(visible_parts(tmp_path)[0])
    assert drop_error_rows(visible_parts(tmp_path)[0], below=10) == 0
    after = os.stat(visible_parts(tmp_path)[0])
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_kill_before_any_system_call_loses_no_row_and_doubles_none(tmp_path: Path) -> None:
    good = [(0, 0, False), (2, 0, False), (2, 1, False), (5, 0, False)]
    bad = [(1, 0, True), (3, 0, True), (4, 0, False), (4, 1, True)]
    first = tmp_path / "killed-1"
    first.mkdir()
    make_part(first, 0, [*good[:1], *bad[:1]])
    make_part(first, 1, bad[1:2])
    make_part(first, 2, [*good[1:3], *bad[2:], *good[3:]])
    for step in range(2, 61):
        shutil.copytree(first, tmp_path / f"killed-{step}")
    ended = subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], check=True, capture_output=True, text=True)
    num_steps = int(ended.stdout)
    assert 15 < num_steps < 60
    num_partly = 0
    for step in range(1, num_steps):
        folder = tmp_path / f"killed-{step}"
        found = read(folder)
        assert set(good) <= set(found) <= {*good, *bad} and len(set(found)) == len(found)
        # A row goes with all its samples or not at all.
        assert ((4, 0, False) in found) == ((4, 1, True) in found)
        num_partly += found not in (good, sorted(good + bad))
        with OutputFolder(folder) as output:
            output.drop_error_rows(below=1000)
        assert read(folder) == good
    assert num_partly > 0
    assert read(tmp_path / f"killed-{num_steps}") == good
