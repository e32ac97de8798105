"""batchllm beside the engines that people would pick instead, on the same workloads, in turn on the same machine.

    python benchmarks/compare.py [--workloads W1,W2] [--peers best | vllm,openvino,llamacpp,transformers] [--rounds 3] [--int8]

Needs the peers' environments (`benchmarks/peers/install.py`), their models (`benchmarks/peers/export_model.py`, `convert_openvino.py`) and the
workloads (`benchmarks/workloads.py`); `make bench-peers` does all.

Each round starts batchllm and a peer as fresh processes that load first; then they take turns, workload by workload, the one first
that was second before. Who is not measured is stopped (SIGSTOP). `--peers best` runs on each workload only the peer, with the settings,
that the sweep found best (`benchmarks/peers/best.json`); in float32 where the processor has no products of bf16. A matrix product and a
stream read are timed before and after each pair.
There is no ratio for a pair where they moved by more than 20 %, another process kept more than 0.3 cores busy, or a row has another
number of tokens than was asked for; there is none for a workload with fewer than three pairs left (or `--rounds`, if that is fewer).
The last line is one JSON object by workload.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from child_process import Child, ChildFailed, OthersWatch
from comparison import Calibration, Measurement, Pair, markdown, summarise

BENCHMARKS = Path(__file__).resolve().parent
PEERS = BENCHMARKS / "peers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchllm-peers"
_OURS = "batchllm"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with its settings (`NAME=VALUE`), and the workloads it runs."""

    name: str
    settings: tuple[str, ...]
    workloads: tuple[str, ...]

    @property
    def label(self) -> str:
        return " ".join((self.name, *self.settings))


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie: environments by peer's name, exported models, workloads, and the logs of the processes."""

    venvs: Path
    models: Path
    workloads: Path
    logs: Path


def choose_engines(*, peers: str, workloads: Sequence[str], kind: str, best: dict[str, Any]) -> list[Engine]:
    """The peers to run: those named, on all workloads with their default settings, or the best of each workload.

    `kind` is `bf16`, `float32` or `int8`; `best` is what best.json holds. Raises KeyError for a workload without a best peer.
    """
    if peers != "best":
        return [
            Engine(name, tuple(best["defaults"][kind].get(name, ())), tuple(workloads)) for name in peers.split(",")
        ]
    chosen: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for workload in workloads:
        entry = best[kind][workload]
        chosen.setdefault((entry["peer"], tuple(entry["settings"])), []).append(workload)
    return [Engine(name, settings, tuple(names)) for (name, settings), names in chosen.items()]


def start(engine: Engine, places: Places, *, limit: int | None) -> Child:
    python = Path(sys.executable) if engine.name == _OURS else places.venvs / engine.name / "bin" / "python"
    command: list[str | Path] = [python, PEERS / f"run_{engine.name}.py", "--model", places.models]
    command += ["--workloads", places.workloads]
    command += ["--limit", str(limit)] if limit is not None else []
    for setting in engine.settings:
        command += ["--set", setting]
    # Each engine chooses its own threads; a peer must not see this repository's modules.
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    if engine.name == _OURS:
        environment["PYTHONPATH"] = str(BENCHMARKS.parent)
    return Child(command, log=places.logs / f"{engine.name}.log", environment=environment)


def measure(engine: Child, workload: str, *, load_s: float, sessions: set[int], timeout_s: float) -> Measurement:
    watch = OthersWatch(sessions)
    answer = engine.ask(workload, timeout_s=timeout_s)
    return Measurement(
        seconds=answer["seconds"],
        output_tokens=tuple(answer["output_tokens"]),
        first_tokens=tuple(answer["first_tokens"]),
        peak_rss_bytes=answer["peak_rss_bytes"],
        first_token_s=answer["first_token_s"],
        load_s=load_s,
        other_cores=watch.cores(),
        details=answer["details"],
    )


def run_pairs(
    ours: Engine, peer: Engine, calibrator: Child, places: Places, *, number: int, limit: int | None, timeout_s: float
) -> Iterator[Pair]:
    """Round `number` of one peer: fresh processes, then its workloads in turn. Raises ChildFailed."""
    with start(ours, places, limit=limit) as our_child:
        our_load_s = our_child.ready(timeout_s=timeout_s)["load_s"]
        with start(peer, places, limit=limit) as peer_child:
            peer_load_s = peer_child.ready(timeout_s=timeout_s)["load_s"]
            sessions = {our_child.session, peer_child.session, calibrator.session}
            before = Calibration(**calibrator.ask("", timeout_s=60))
            for place, workload in enumerate(peer.workloads):
                turns = [(_OURS, our_child, our_load_s), (peer.name, peer_child, peer_load_s)]
                if (number + place) % 2:
                    turns.reverse()
                runs = {
                    name: measure(child, workload, load_s=load_s, sessions=sessions, timeout_s=timeout_s)
                    for name, child, load_s in turns
                }
                after = Calibration(**calibrator.ask("", timeout_s=60))
                table = pq.read_table(places.workloads / f"{workload}.parquet", columns=["max_tokens"]).slice(0, limit)
                yield Pair(
                    workload=workload,
                    peer=peer.label,
                    round=number,
                    wanted_tokens=tuple(table.column("max_tokens").to_pylist()),
                    ours=runs[_OURS],
                    theirs=runs[peer.name],
                    before=before,
                    after=after,
                )
                before = after


def compare(
    ours: Engine, peers: Sequence[Engine], places: Places, *, rounds: int, limit: int | None, timeout_s: float
) -> tuple[list[Pair], list[str]]:
    """All pairs, and what failed. A peer that fails in a round is tried again in the next."""
    pairs: list[Pair] = []
    failed: list[str] = []
    with Child([sys.executable, BENCHMARKS / "calibration.py"], log=places.logs / "calibration.log") as calibrator:
        calibrator.ready(timeout_s=120)
        for number in range(1, rounds + 1):
            for peer in peers:
                try:
                    for pair in run_pairs(
                        ours, peer, calibrator, places, number=number, limit=limit, timeout_s=timeout_s
                    ):
                        pairs.append(pair)
                        _say(pair)
                except ChildFailed as error:
                    failed.append(f"round {number}, {peer.label}: {error}")
                    print(failed[-1], file=sys.stderr)
    return pairs, failed


def _say(pair: Pair) -> None:
    reasons = pair.refusals()
    verdict = f"ratio {pair.ratio:.2f}" if not reasons else "no ratio: " + "; ".join(reasons)
    print(
        f"round {pair.round} {pair.workload}: batchllm {pair.ours.seconds:.2f} s, {pair.peer} {pair.theirs.seconds:.2f} s, "
        f"{verdict} ({pair.before.matmul_gflops:.0f} GFLOP/s, {pair.before.stream_gb_per_s:.1f} GB/s; "
        f"first tokens agree {pair.agreement:.0%})",
        file=sys.stderr,
    )


def processor_name(cpuinfo: str) -> str:
    """The first core's model, from the text of /proc/cpuinfo."""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown"


def peers_type(cpuinfo: str) -> str:
    """The type that peers compute unquantised weights in: bf16 where the processor has products of it, from the text of /proc/cpuinfo.

    Without them vLLM in bf16 takes several times what it takes in float32.
    """
    flags = {flag for line in cpuinfo.splitlines() if line.startswith("flags") for flag in line.split()}
    return "bf16" if flags & {"amx_bf16", "avx512_bf16"} else "float32"


def end_on_sigterm() -> None:
    """SIGTERM unwinds this program, so that no stopped child is left behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5,W6,W7")
    parser.add_argument("--peers", default="best", help="best, or names with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--int8", action="store_true", help="quantised weights on both sides")
    parser.add_argument("--limit", type=int, default=None, help="the first rows of each workload only")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of batchllm's runner"
    )
    parser.add_argument("--peer-set", action="append", default=[], metavar="NAME=VALUE", help="a setting of every peer")
    parser.add_argument("--venvs", type=Path, default=CACHE)
    parser.add_argument("--models", type=Path, default=CACHE / "model")
    parser.add_argument("--workload-folder", type=Path, default=CACHE / "workloads")
    parser.add_argument(
        "--output", type=Path, default=CACHE / "compare", help="folder of compare.json, compare.md and logs"
    )
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for a load or a workload")
    options = parser.parse_args()
    workloads = options.workloads.split(",")
    cpuinfo = Path("/proc/cpuinfo").read_text()
    kind = "int8" if options.int8 else peers_type(cpuinfo)
    best = json.loads((PEERS / "best.json").read_text())
    ours = Engine(_OURS, (*(["weights=int8"] if options.int8 else []), *options.set), tuple(workloads))
    peers = [
        Engine(peer.name, (*peer.settings, *options.peer_set), peer.workloads)
        for peer in choose_engines(peers=options.peers, workloads=workloads, kind=kind, best=best)
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    end_on_sigterm()
    places = Places(options.venvs, options.models, options.workload_folder, logs=options.output)
    pairs, failed = compare(
        ours, peers, places, rounds=options.rounds, limit=options.limit, timeout_s=options.timeout_s
    )
    summary = summarise(pairs, rounds=options.rounds)
    table = markdown(summary)
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": processor_name(cpuinfo),
        "cores": len(os.sched_getaffinity(0)),
        "command": ["benchmarks/compare.py", *sys.argv[1:]],
        "kind": kind,
    }
    record = {"about": about, "summary": summary, "failed": failed, "pairs": [asdict(pair) for pair in pairs]}
    (options.output / "compare.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.output / "compare.md").write_text(table + "\n")
    print(table)
    short = {name: {key: value for key, value in entry.items() if key != "peers"} for name, entry in summary.items()}
    print(json.dumps(short))


if __name__ == "__main__":
    main()
