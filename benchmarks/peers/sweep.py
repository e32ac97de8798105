"""Which settings of each peer are its best: every variant once on pieces of the workloads.

    python benchmarks/peers/sweep.py [--peers vllm,openvino] [--workloads W2,W3] [--limit 64] [--one-core]

Each variant is a fresh process that loads and then runs the pieces (the first `--limit` rows). With `--one-core` it has one core (but OpenVINO,
which cannot) and is judged by the CPU time it used, which other work on the machine hardly changes; else by seconds, which need a quiet machine. Results are written
to `--output` as JSON after each variant and printed as a table. What won is written by hand into `best.json`, with its reasons in
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parent
sys.path.insert(0, str(PEERS.parent))

from child_process import ChildFailed, sessions_cpu_s  # noqa: E402
from compare import CACHE, Engine, Places, best_settings, end_on_signals, names_among, start, what_is_missing  # noqa: E402

VARIANTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (
        (),
        ("enforce_eager=true",),
        ("max_num_batched_tokens=8192",),
        ("max_num_batched_tokens=2048",),
        ("max_num_seqs=128",),
        ("block_size=32",),
    ),
    "openvino": (
        (),
        ("window=256",),
        ("window=16",),
        ("order=sorted",),
        ("weights=int8",),
        ("max_num_batched_tokens=512",),
        ("kv=bf16",),
        ("weights=int8", "precision=f32"),
        ("window=128",),
        ("max_num_batched_tokens=8192",),
    ),
    "llamacpp": (
        (),
        ("weights=q8_0",),
        ("slots=8", "order=sorted"),
        ("unified=true",),
        ("unified=true", "slots=8", "order=sorted"),
        ("slots=64",),
        ("flash_attention=false",),
        ("ubatch_tokens=2048",),
    ),
    "transformers": ((), ("batch=16",), ("batch=128",), ("mode=continuous",)),
}

# OpenVINO divides by zero in a process that is bound to one core, and when it is told a number of threads.
_NEEDS_ALL_CORES = ("openvino",)


@dataclass(frozen=True, slots=True)
class Trial:
    """One variant on one piece. `cpu_s` of all its threads; `failed` says why there are no times."""

    peer: str
    settings: tuple[str, ...]
    workload: str
    limit: int
    seconds: float | None
    cpu_s: float | None
    failed: str | None = None


def try_variant(engine: Engine, places: Places, *, limit: int, one_core: bool, timeout_s: float) -> list[Trial]:
    """Runs the variant's workloads in one process; a failure ends it and is its last trial."""
    trials: list[Trial] = []
    before = os.sched_getaffinity(0)
    if one_core and engine.name not in _NEEDS_ALL_CORES:
        os.sched_setaffinity(0, {max(before)})
    try:
        child = start(engine, places, limit=limit)
    finally:
        os.sched_setaffinity(0, before)
    with child:
        try:
            child.ready(timeout_s=timeout_s)
            for workload in engine.workloads:
                cpu_before_s = sessions_cpu_s([child.session])
                answer = child.ask(workload, timeout_s=timeout_s)
                cpu_s = sessions_cpu_s([child.session]) - cpu_before_s
                trials.append(
                    Trial(engine.name, engine.settings, workload, limit, round(answer["seconds"], 2), round(cpu_s, 2))
                )
        except ChildFailed as error:
            missing = engine.workloads[len(trials)]
            trials.append(Trial(engine.name, engine.settings, missing, limit, None, None, str(error)))
    return trials


def table(trials: Sequence[Trial], *, by_cpu: bool) -> str:
    """A row a trial, the fastest of each workload first."""

    def time_of(trial: Trial) -> float:
        value = trial.cpu_s if by_cpu else trial.seconds
        return float("inf") if value is None else value

    lines = ["| workload | peer | settings | seconds | CPU s |", "|---|---|---|---|---|"]
    for trial in sorted(trials, key=lambda trial: (trial.workload, time_of(trial))):
        times = f"{trial.seconds} | {trial.cpu_s}" if trial.failed is None else f"failed | {trial.failed[:60]}"
        lines.append(f"| {trial.workload} | {trial.peer} | {' '.join(trial.settings) or 'default'} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=names_among(list(VARIANTS)), default=list(VARIANTS))
    parser.add_argument("--workloads", type=names_among(list(best_settings()["bf16"])), default=["W2", "W3"])
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--venvs", type=Path, default=CACHE)
    parser.add_argument("--models", type=Path, default=CACHE / "model")
    parser.add_argument("--workload-folder", type=Path, default=CACHE / "workloads")
    parser.add_argument("--output", type=Path, default=CACHE / "sweep")
    options = parser.parse_args()
    end_on_signals()
    places = Places(options.venvs, options.models, options.workload_folder, logs=options.output)
    engines = [
        Engine(name, settings, tuple(options.workloads)) for name in options.peers for settings in VARIANTS[name]
    ]
    if missing := what_is_missing(engines, places):
        sys.exit("\n".join(missing))
    options.output.mkdir(parents=True, exist_ok=True)
    trials: list[Trial] = []
    for engine in engines:
        trials += try_variant(
            engine, places, limit=options.limit, one_core=options.one_core, timeout_s=options.timeout_s
        )
        print(trials[-1], file=sys.stderr)
        text = json.dumps([asdict(trial) for trial in trials], indent=1)
        (options.output / f"sweep-{'-'.join(options.peers)}.json").write_text(text + "\n")
    print(table(trials, by_cpu=options.one_core))


if __name__ == "__main__":
    main()
