"""batchllm beside the engines that people would pick instead, on the same workloads, in turn on the same machine.

    python benchmarks/compare.py [--workloads W1,W2] [--peers best | vllm,openvino,llamacpp,transformers] [--rounds 3] [--most-rounds 9]
        [--int8]

Needs the peers' environments (`benchmarks/peers/install.py`), their models (`benchmarks/peers/export_model.py`, `convert_openvino.py`) and the
workloads (`benchmarks/workloads.py`); `make bench-peers` does all.

Each round starts batchllm and a peer as fresh processes that load first; then they take turns, workload by workload, the one first
that was second before. Who is not measured is stopped (SIGSTOP). `--peers best` runs on each workload only the peer, with the settings,
that the sweep found best (`benchmarks/peers/best.json`); in float32 where the processor has no products of bf16. A matrix product and a
stream read are timed before and after each pair.
There is no ratio for a pair where they moved by more than 20 %, another process kept more than 0.3 cores busy, or a row has another
number of tokens than was asked for; there is none for a workload with fewer than three pairs left (or `--rounds`, if that is fewer).
With `--most-rounds` a workload is run again, up to so many times, until `--rounds` of its pairs count; those that do not stay in the record.
`compare.json` and `compare.md` are written after each pair. The last line is one JSON object by workload.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from child_process import Child, ChildFailed, OthersWatch
from comparison import Calibration, Measurement, Pair, markdown, summarise

from batchllm.data.replaced_file import replace_file
from batchllm.errors import BatchLLMError

BENCHMARKS = Path(__file__).resolve().parent
PEERS = BENCHMARKS / "peers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchllm-peers"
_OURS = "batchllm"
_PEERS = ("vllm", "openvino", "llamacpp", "transformers")


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


def best_settings() -> dict[str, Any]:
    """What the sweep found: see `choose_engines`."""
    found: dict[str, Any] = json.loads((PEERS / "best.json").read_text())
    return found


def choose_engines(*, peers: Sequence[str], workloads: Sequence[str], kind: str, best: dict[str, Any]) -> list[Engine]:
    """The peers to run: those named, on all workloads with their default settings, or for `best` alone the best of each workload.

    `kind` is `bf16`, `float32` or `int8`; `best` is what best.json holds. Raises KeyError for a workload without a best peer.
    """
    if list(peers) != ["best"]:
        return [Engine(name, tuple(best["defaults"][kind].get(name, ())), tuple(workloads)) for name in peers]
    chosen: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for workload in workloads:
        entry = best[kind][workload]
        chosen.setdefault((entry["peer"], tuple(entry["settings"])), []).append(workload)
    return [Engine(name, settings, tuple(names)) for (name, settings), names in chosen.items()]


def python_of(engine: Engine, places: Places) -> Path:
    return Path(sys.executable) if engine.name == _OURS else places.venvs / engine.name / "bin" / "python"


def what_is_missing(peers: Sequence[Engine], places: Places) -> list[str]:
    """A line for each thing that a comparison needs and that is not there, with the command that makes it."""
    lines = [
        f"no environment of {peer.name} in {places.venvs}: python benchmarks/peers/install.py {peer.name}"
        for peer in peers
        if not python_of(peer, places).exists()
    ]
    workloads = sorted({workload for peer in peers for workload in peer.workloads})
    lines += [
        f"no {workload}.parquet in {places.workloads}: python benchmarks/workloads.py --only {workload}"
        for workload in workloads
        if not (places.workloads / f"{workload}.parquet").exists()
    ]
    if not places.models.is_dir():
        lines.append(f"no exported models in {places.models}: python benchmarks/peers/export_model.py")
    return list(dict.fromkeys(lines))


def start(engine: Engine, places: Places, *, limit: int | None) -> Child:
    command: list[str | Path] = [python_of(engine, places), PEERS / f"run_{engine.name}.py", "--model", places.models]
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
    try:
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
    except KeyError as error:
        raise ChildFailed(f"its answer on {workload} has no {error}") from None


def run_pairs(
    ours: Engine,
    peer: Engine,
    calibrator: Child,
    places: Places,
    *,
    workloads: Sequence[str],
    number: int,
    limit: int | None,
    timeout_s: float,
) -> Iterator[Pair]:
    """Round `number` of one peer: fresh processes, then the workloads in turn. Raises ChildFailed."""
    with start(ours, places, limit=limit) as our_child:
        our_load_s = our_child.ready(timeout_s=timeout_s)["load_s"]
        with start(peer, places, limit=limit) as peer_child:
            peer_load_s = peer_child.ready(timeout_s=timeout_s)["load_s"]
            sessions = {our_child.session, peer_child.session, calibrator.session}
            before = Calibration(**calibrator.ask("", timeout_s=60))
            for place, workload in enumerate(workloads):
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
    ours: Engine,
    peers: Sequence[Engine],
    places: Places,
    *,
    rounds: int,
    most_rounds: int,
    limit: int | None,
    timeout_s: float,
) -> Iterator[Pair | str]:
    """Each pair once it is measured, and a line for each failure. A peer that fails in a round is tried again in the next."""
    counted: Counter[tuple[str, str]] = Counter()
    with Child([sys.executable, BENCHMARKS / "calibration.py"], log=places.logs / "calibration.log") as calibrator:
        calibrator.ready(timeout_s=120)
        for number in range(1, most_rounds + 1):
            for peer in peers:
                left = [name for name in peer.workloads if number <= rounds or counted[peer.label, name] < rounds]
                if not left:
                    continue
                try:
                    for pair in run_pairs(
                        ours,
                        peer,
                        calibrator,
                        places,
                        workloads=left,
                        number=number,
                        limit=limit,
                        timeout_s=timeout_s,
                    ):
                        counted[peer.label, pair.workload] += not pair.refusals()
                        yield pair
                except ChildFailed as error:
                    yield f"round {number}, {peer.label}: {error}"


class Record:
    """What was measured so far, as `compare.json` and `compare.md` of a folder say it."""

    def __init__(self, folder: Path, *, about: Mapping[str, Any], rounds: int) -> None:
        self.pairs: list[Pair] = []
        self.failed: list[str] = []
        self._folder = folder
        self._about = dict(about)
        self._rounds = rounds

    @property
    def summary(self) -> dict[str, dict[str, Any]]:
        return summarise(self.pairs, rounds=self._rounds)

    def add(self, outcome: Pair | str) -> None:
        """A pair, or a line on one that failed. Raises FolderError or OutputError where the files cannot be written."""
        if isinstance(outcome, Pair):
            self.pairs.append(outcome)
            _say(outcome)
        else:
            self.failed.append(outcome)
            print(outcome, file=sys.stderr)
        pairs = [asdict(pair) for pair in self.pairs]
        record = {"about": self._about, "summary": self.summary, "failed": self.failed, "pairs": pairs}
        for name, text in (("compare.json", json.dumps(record, indent=1)), ("compare.md", markdown(self.summary))):
            replace_file(self._folder / name, [f"{text}\n".encode()])


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


def end_on_signals() -> None:
    """SIGTERM, and SIGHUP of a terminal that closes, unwind this program, so that no stopped child is left behind. What is ignored stays so (nohup)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def names_among(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes names with commas between."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"no {name!r} among {', '.join(allowed)}")
        return list(dict.fromkeys(names))

    return parse


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _setting(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return text


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = list(best_settings()["bf16"])
    parser.add_argument("--workloads", type=names_among(workloads), default=workloads)
    parser.add_argument(
        "--peers", type=names_among(["best", *_PEERS]), default=["best"], help="best, or names with commas between"
    )
    parser.add_argument("--rounds", type=_at_least_one, default=3)
    parser.add_argument("--most-rounds", type=_at_least_one, help="by default `--rounds`")
    parser.add_argument("--int8", action="store_true", help="quantised weights on both sides")
    parser.add_argument("--limit", type=_at_least_one, default=None, help="the first rows of each workload only")
    setting: dict[str, Any] = {"action": "append", "default": [], "type": _setting, "metavar": "NAME=VALUE"}
    parser.add_argument("--set", **setting, help="a setting of batchllm's runner")
    parser.add_argument("--peer-set", **setting, help="a setting of every peer")
    parser.add_argument("--venvs", type=Path, default=CACHE)
    parser.add_argument("--models", type=Path, default=CACHE / "model")
    parser.add_argument("--workload-folder", type=Path, default=CACHE / "workloads")
    parser.add_argument(
        "--output", type=Path, default=CACHE / "compare", help="folder of compare.json, compare.md and logs"
    )
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for a load or a workload")
    options = parser.parse_args()
    if "best" in options.peers and len(options.peers) > 1:
        parser.error("--peers: best goes with no other name")
    return options


def run(options: argparse.Namespace) -> Record:
    """Measures and writes down. Raises OSError, FolderError or OutputError, and ChildFailed where the machine's speed cannot be measured; leaves by SystemExit where something is
    missing.
    """
    cpuinfo = Path("/proc/cpuinfo").read_text()
    kind = "int8" if options.int8 else peers_type(cpuinfo)
    ours = Engine(_OURS, (*(["weights=int8"] if options.int8 else []), *options.set), tuple(options.workloads))
    peers = [
        Engine(peer.name, (*peer.settings, *options.peer_set), peer.workloads)
        for peer in choose_engines(peers=options.peers, workloads=options.workloads, kind=kind, best=best_settings())
    ]
    places = Places(options.venvs, options.models, options.workload_folder, logs=options.output)
    if missing := what_is_missing(peers, places):
        sys.exit("\n".join(missing))
    options.output.mkdir(parents=True, exist_ok=True)
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": processor_name(cpuinfo),
        "cores": len(os.sched_getaffinity(0)),
        "command": ["benchmarks/compare.py", *sys.argv[1:]],
        "kind": kind,
    }
    record = Record(options.output, about=about, rounds=options.rounds)
    outcomes = compare(
        ours,
        peers,
        places,
        rounds=options.rounds,
        most_rounds=max(options.rounds, options.most_rounds or 0),
        limit=options.limit,
        timeout_s=options.timeout_s,
    )
    # Closed at once: its children would else outlive an error until the collector runs.
    with contextlib.closing(outcomes):
        for outcome in outcomes:
            record.add(outcome)
    return record


def main() -> None:
    options = parse_options()
    end_on_signals()
    try:
        record = run(options)
    except (OSError, BatchLLMError, ChildFailed) as error:
        sys.exit(f"compare: {error}")
    except KeyboardInterrupt:
        sys.exit(f"compare: interrupted; the pairs so far are in {options.output}/compare.json")
    summary = record.summary
    print(markdown(summary))
    print(json.dumps({name: {key: entry[key] for key in entry if key != "peers"} for name, entry in summary.items()}))
    if unmeasured := [name for name in options.workloads if name not in summary]:
        sys.exit(f"compare: no pair of {', '.join(unmeasured)}: {record.failed[-1]}")


if __name__ == "__main__":
    main()
