"""The processes of a comparison: they sleep when they are not asked, and say why they ended. Stand-ins speak the protocol."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from child_process import Child, ChildFailed, OthersWatch, busy_s, sessions_cpu_s
from compare import PEERS, Engine, choose_engines, peers_type, processor_name
from protocol import parse_settings

SPINNING = "import sys\nprint('{\"ready\": true}', flush=True)\nwhile True: pass\n"
ECHO = "import sys, json\nprint(json.dumps({'ready': True}), flush=True)\nfor line in sys.stdin: print(json.dumps({'got': line.strip()}), flush=True)\n"
ENDING = (
    "import sys\nprint('{}', flush=True)\nsys.stdin.readline()\nprint('out of luck', file=sys.stderr)\nsys.exit(3)\n"
)


def test_a_child_that_spins_uses_no_cpu_while_another_is_measured(tmp_path: Path) -> None:
    with Child([sys.executable, "-c", SPINNING], log=tmp_path / "log") as child:
        child.ready(timeout_s=60)
        time.sleep(0.05)
        before_s = sessions_cpu_s([child.session])
        time.sleep(0.5)
        assert sessions_cpu_s([child.session]) == before_s > 0


def test_a_child_is_woken_for_each_question(tmp_path: Path) -> None:
    with Child([sys.executable, "-c", ECHO], log=tmp_path / "log") as child:
        child.ready(timeout_s=60)
        assert [child.ask(name, timeout_s=60)["got"] for name in ("W1", "W2")] == ["W1", "W2"]


def test_a_child_that_ends_or_is_late_is_named_with_its_last_lines(tmp_path: Path) -> None:
    with Child([sys.executable, "-c", ENDING], log=tmp_path / "log") as child:
        child.ready(timeout_s=60)
        with pytest.raises(ChildFailed, match="ended; .*log ends: out of luck"):
            child.ask("W1", timeout_s=60)
    with Child([sys.executable, "-c", SPINNING], log=tmp_path / "log") as child:
        child.ready(timeout_s=60)
        with pytest.raises(ChildFailed, match="gave no answer within 0 s"):
            child.ask("W1", timeout_s=0.2)


def test_cpu_time_leaves_out_idling_and_counts_stolen_time() -> None:
    assert busy_s("cpu  100 20 30 9999 999 1 2 3 50 0\ncpu0 1 2 3\n") == pytest.approx(1.56)


def test_work_of_a_process_outside_the_sessions_is_seen(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(0.3)
        watch = OthersWatch([])
        time.sleep(0.5)
        assert watch.cores() > 0.1
        other.kill()


def test_best_peers_run_together_only_where_their_settings_are_the_same() -> None:
    best = {
        "bf16": {
            "W1": {"peer": "vllm", "settings": []},
            "W2": {"peer": "openvino", "settings": ["window=32"]},
            "W3": {"peer": "vllm", "settings": []},
        }
    }
    assert choose_engines(peers=["best"], workloads=["W1", "W2", "W3"], kind="bf16", best=best) == [
        Engine("vllm", (), ("W1", "W3")),
        Engine("openvino", ("window=32",), ("W2",)),
    ]


def test_the_kept_best_settings_cover_every_workload_and_name_runners_that_exist() -> None:
    best = json.loads((PEERS / "best.json").read_text())
    for kind in ("bf16", "float32", "int8"):
        assert list(best[kind]) == [f"W{number}" for number in range(1, 8)]
        names = {entry["peer"] for entry in best[kind].values()} | set(best["defaults"][kind])
        for name in names:
            assert (PEERS / f"run_{name}.py").exists() and (PEERS / "requirements" / f"{name}.txt").exists()


def test_settings_are_read_as_the_type_of_their_default_and_an_unknown_one_ends_the_program() -> None:
    @dataclass(frozen=True)
    class Settings:
        slots: int = 4
        eager: bool = False
        kind: str = "bf16"

    assert parse_settings(Settings, ["slots=8", "eager=true"]) == Settings(slots=8, eager=True)
    with pytest.raises(SystemExit, match="--set slot: unknown; known: eager, kind, slots"):
        parse_settings(Settings, ["slot=8"])


def test_the_machine_is_named_by_its_processor() -> None:
    assert (
        processor_name("processor\t: 0\nmodel name\t: Some CPU @ 2.6GHz\n\nmodel name\t: Other\n")
        == "Some CPU @ 2.6GHz"
    )
    assert processor_name("") == "unknown"


def test_peers_compute_in_float32_where_the_processor_has_no_products_of_bf16() -> None:
    assert peers_type("flags\t\t: fpu avx512f amx_bf16 amx_tile\n") == "bf16"
    assert peers_type("flags\t\t: fpu avx512f avx512_bf16\n") == "bf16"
    assert peers_type("flags\t\t: fpu avx512f avx512_vnni\nbugs\t\t: amx_bf16\n") == "float32"
