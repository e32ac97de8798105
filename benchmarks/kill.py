"""kill -9 at random moments of a job, resumed each time: each row exactly once, and what it says as if nothing had happened.

    python benchmarks/kill.py jobs/classify.yaml [--kills 30] [--seed 0] [-- --set model=… --set engine.dtype=fp32]

The job first runs undisturbed. Then it runs into other folders, where each run is killed at a random moment of that time, its start
included; when one comes to its end before its moment, the job starts anew in the next folder, until so many are killed. Meanwhile DuckDB reads the parts over and over: each read must work, and no row may be there twice or vanish.
What stands behind `--` goes to `batchllm run`. The last line is one JSON object; the exit code is 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import duckdb

START = "from batchllm.cli.main import main; main()"
_MADE_BY_THE_RUN = "queue_s, ttft_s, tpot_s, e2e_s, preemptions, cached_tokens, restored_tokens, run_id"
"""Columns that tell of the run and not of the row."""


def start(job: Path, output: Path, options: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", START, "run", str(job), "--json", *options, "--set", f"output.path={output}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(job: Path, output: Path, options: list[str]) -> float:
    """Runs to the end; seconds. Ends the program where the job itself does not work."""
    started_at = time.monotonic()
    with start(job, output, options) as process:
        _, errors = process.communicate()
    if process.returncode not in (0, 3):
        sys.exit(f"the job ends with {process.returncode}: {errors.decode().strip()}")
    return time.monotonic() - started_at


def difference(one: Path, other: Path) -> int:
    """Rows that are in one folder and not in the other, with all that must be equal."""
    connection = duckdb.connect()
    tables = [f"select * exclude ({_MADE_BY_THE_RUN}) from read_parquet('{path}/*.parquet')" for path in (one, other)]
    counts = [
        connection.execute(f"select count(*) from (({a}) except all ({b}))").fetchall()[0][0]
        for a, b in (tables, tables[::-1])
    ]
    return sum(counts)


class Reader:
    """Reads the parts with DuckDB until `stop`; keeps what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.num_reads = 0
        self.num_rows = 0
        self.faults: list[str] = []
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        keys = "row_index, sample_index"
        sql = f"select count(*), count(distinct ({keys})) from read_parquet('{self._folder}/*.parquet')"
        while not self._over.wait(0.02):
            if not any(self._folder.glob("*.parquet")):
                continue
            try:
                ((num_rows, num_distinct),) = duckdb.connect().execute(sql).fetchall()
            except duckdb.Error as error:
                self.faults.append(f"a read failed: {error}")
                continue
            if num_rows != num_distinct or num_rows < self.num_rows:
                self.faults.append(f"{num_rows} rows, {num_distinct} distinct, after {self.num_rows}")
            self.num_reads, self.num_rows = self.num_reads + 1, num_rows


def kill_until_done(
    arguments: argparse.Namespace, output: Path, *, moments: random.Random, seconds: float, most: int
) -> int:
    """Starts and kills runs of one job until one ends by itself or `most` are killed; how many were killed."""
    for num_killed in range(most):
        process = start(arguments.job, output, arguments.options)
        moment = moments.uniform(0, seconds)
        try:
            process.communicate(timeout=moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            print(f"{output.name}: killed after {moment:.1f} s", file=sys.stderr)
        else:
            return num_killed
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="for batchllm run, behind --")
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        seconds = finish(arguments.job, whole, arguments.options)
        tally = {"kills": 0, "jobs": 0, "reads": 0, "rows_different": 0}
        faults: list[str] = []
        while tally["kills"] < arguments.kills:
            cut = Path(name) / f"cut-{tally['jobs']}"
            reader = Reader(cut)
            left = arguments.kills - tally["kills"]
            tally["kills"] += kill_until_done(arguments, cut, moments=moments, seconds=seconds, most=left)
            finish(arguments.job, cut, arguments.options)
            reader.stop()
            faults += reader.faults
            tally["jobs"] += 1
            tally["reads"] += reader.num_reads
            tally["rows_different"] += difference(whole, cut)
    result = {
        "benchmark": "kill",
        "undisturbed_s": round(seconds, 1),
        **tally,
        "rows": reader.num_rows,
        "faults": faults[:5],
        "ok": not faults and tally["rows_different"] == 0,
    }
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
