"""`compare.py` as a command, with peers that are scripts: what is missing, what fails, what an interruption leaves behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import comparison
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from child_process import Child, ChildFailed
from compare import BENCHMARKS, Engine, Places, Record, compare, what_is_missing
from comparison import Pair

from batchllm.errors import OutputError

HOLDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from child_process import Child
child = Child([sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(600)"], log=Path(sys.argv[2]))
child.ready(timeout_s=60)
print(child.session, flush=True)
time.sleep(600)
"""

PEER = """
import json, sys
print(json.dumps({"load_s": 1.0}), flush=True)
for line in sys.stdin:
    print(ANSWER, flush=True)
"""
ANSWER = {
    "seconds": 2.0,
    "output_tokens": [4, 8],
    "first_tokens": [1, 2],
    "peak_rss_bytes": 5,
    "first_token_s": None,
    "details": {},
}


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "compare.py", *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workloads", "W9"], "no 'W9' among W1, W2"),
        (["--workloads", ""], "no '' among W1, W2"),
        (["--peers", "vlm"], "no 'vlm' among best, vllm"),
        (["--peers", "best,vllm"], "best goes with no other name"),
        (["--rounds", "0"], "0 is less than 1"),
        (["--set", "dtype"], "'dtype' is not NAME=VALUE"),
    ],
)
def test_wrong_arguments_are_one_line_and_no_traceback(arguments: list[str], says: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]


def test_what_is_missing_is_said_before_anything_runs_with_the_command_that_makes_it(tmp_path: Path) -> None:
    done = command("--workloads", "W1,W3", "--venvs", tmp_path, "--models", tmp_path, "--workload-folder", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"no environment of vllm in {tmp_path}: python benchmarks/peers/install.py vllm",
        f"no W1.parquet in {tmp_path}: python benchmarks/workloads.py --only W1",
        f"no W3.parquet in {tmp_path}: python benchmarks/workloads.py --only W3",
    ]


def test_a_parent_that_is_killed_leaves_no_stopped_child(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, BENCHMARKS, tmp_path / "log"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert all_end([child])


def all_end(processes: list[int]) -> bool:
    """Whether none is left, at once or soon."""
    deadline = time.monotonic() + 30
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, processes))


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("answer", ["no JSON", "[1]", "\\x00"])
def test_an_answer_that_is_no_object_is_the_childs_failure(tmp_path: Path, answer: str) -> None:
    with (
        Child([sys.executable, "-c", f"print('{answer}', flush=True); input()"], log=tmp_path / "log") as child,
        pytest.raises(ChildFailed, match="which is no JSON object"),
    ):
        child.ready(timeout_s=60)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """With the environment of a peer `vllm` whose python runs a script instead."""
    for name in ("venvs/vllm/bin", "models", "workloads", "logs"):
        (tmp_path / name).mkdir(parents=True)
    pq.write_table(pa.table({"max_tokens": pa.array([4, 8], pa.int32())}), tmp_path / "workloads" / "W1.parquet")
    return Places(tmp_path / "venvs", tmp_path / "models", tmp_path / "workloads", logs=tmp_path / "logs")


def put_peer(places: Places, answer: str) -> Engine:
    script = places.venvs / "peer.py"
    script.write_text(PEER.replace("ANSWER", repr(answer)))
    python = places.venvs / "vllm" / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    python.chmod(0o755)
    return Engine("vllm", (), ("W1",))


def outcomes_of(engine: Engine, places: Places, **rounds: int) -> list[Pair | str]:
    return list(compare(engine, [engine], places, limit=None, timeout_s=60, **rounds))


def test_an_answer_without_seconds_fails_its_round_alone(places: Places) -> None:
    engine = put_peer(places, json.dumps({key: ANSWER[key] for key in ANSWER if key != "seconds"}))
    assert not what_is_missing([engine], places)
    outcomes = outcomes_of(engine, places, rounds=2, most_rounds=2)
    assert outcomes == [f"round {number}, vllm: its answer on W1 has no 'seconds'" for number in (1, 2)]


def test_rounds_go_on_until_enough_pairs_count_and_no_further_than_said(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = put_peer(places, json.dumps(ANSWER | {"output_tokens": [4, 7]}))
    assert len(outcomes_of(wrong, places, rounds=1, most_rounds=3)) == 3
    monkeypatch.setattr(comparison, "MOST_DRIFT", math.inf)
    monkeypatch.setattr(comparison, "MOST_OTHER_CORES", math.inf)
    assert len(outcomes_of(put_peer(places, json.dumps(ANSWER)), places, rounds=1, most_rounds=3)) == 1


def test_the_record_holds_every_pair_so_far_and_is_replaced_as_a_whole(places: Places, tmp_path: Path) -> None:
    (pair,) = outcomes_of(put_peer(places, json.dumps(ANSWER)), places, rounds=1, most_rounds=1)
    record = Record(tmp_path, about={"kind": "bf16"}, rounds=3)
    record.add(pair)
    record.add("round 2, vllm: ended")
    kept = json.loads((tmp_path / "compare.json").read_text())
    assert (len(kept["pairs"]), kept["failed"], kept["about"]) == (1, ["round 2, vllm: ended"], {"kind": "bf16"})
    (tmp_path / f".compare.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OutputError):
        record.add(pair)
    assert json.loads((tmp_path / "compare.json").read_text()) == kept
    assert (tmp_path / "compare.md").read_text().startswith("| workload |")


def test_a_folder_that_cannot_be_written_is_one_line(places: Places) -> None:
    put_peer(places, json.dumps(ANSWER))
    folders = ("--venvs", places.venvs, "--models", places.models, "--workload-folder", places.workloads)
    done = command("--workloads", "W1", *folders, "--output", "/proc/nothing")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["compare: [Errno 2] No such file or directory: '/proc/nothing'"]


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGINT, 1, "compare: interrupted; the pairs so far are in {}/compare.json"),
        (signal.SIGTERM, 128 + signal.SIGTERM, ""),
        (signal.SIGHUP, 128 + signal.SIGHUP, ""),
    ],
)
def test_an_interruption_ends_the_children(
    places: Places, tmp_path: Path, number: signal.Signals, code: int, says: str
) -> None:
    put_peer(places, json.dumps(ANSWER))
    folders = ("--venvs", places.venvs, "--models", places.models, "--workload-folder", places.workloads)
    with subprocess.Popen(
        [sys.executable, BENCHMARKS / "compare.py", "--workloads", "W1", *folders, "--output", tmp_path / "out"],
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore it, and so would this one in a suite that is one.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + 60
        while not (children := children_of(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert children
    assert all_end(children)
    assert (process.returncode, errors.strip()) == (code, says.format(tmp_path / "out"))


def children_of(process: int) -> list[int]:
    return [int(name) for name in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_workloads_that_are_not_known_are_one_line() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "workloads.py", "--only", "W9"], capture_output=True, text=True, env=os.environ
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "workloads.py: error: --only: no 'W9' among W1, W2, W3, W4, W5, W6, W7",
    )
