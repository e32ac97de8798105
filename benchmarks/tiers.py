"""What tiers cost and save: jobs whose KV demand is four times their pool, with and without tiers.

    python benchmarks/tiers.py [--folder /path/on/the/disk] [--rounds 2]

The job asks a few questions about each of many documents, in an order that scatters each document's questions. `unlimited`
runs it in a pool that never gives up a block; the other ways have a quarter of the most blocks that this one used: `ram` (a
host tier), `disk` (a disk tier alone), `lru` (as `ram`, by recency instead of next use), `recompute` (no tier). A second job,
the same over a tiny model whose blocks cost next to nothing to compute, has no use for tiers: there `ram` is compared with
`recompute`. In each round every way of the first job runs once, one after the other, every other round in reverse. The two ways of the
second job, which has three times as many documents and then takes more than a second, run at once, twenty steps of one and twenty of the other, in
five times as many rounds: they differ by less than a machine from second to second. Ratios are medians over rounds of one way's seconds over
the other's in the same round. Seconds are those of the engine's loop; measuring the machine when tiers are opened takes `setup_s` more.

A quarter of the pool still holds the sequences that run at once: where it does not, the batch runs narrower and no tier can mend that.
On a machine that others use, set OMP_NUM_THREADS=1 and look at the CPU seconds of each line too.

The last line is one JSON object; with fio installed, `benchmarks/tiers_disk.py` adds its figures to it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from batchllm.engine.decoder import kv_shape
from batchllm.engine.engine import Engine, EngineConfig
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.sizing import most_blocks
from batchllm.engine.tier_report import report_tiers
from batchllm.engine.tier_setup import DiskRequest, TierRequest, open_tiers
from batchllm.models.decoder import Decoder, dtype_for
from batchllm.models.loading import load_decoder
from batchllm.models.random_model import SMALL, RandomWeights
from batchllm.models.registry import resolve_model
from batchllm.ops import select_kernels
from batchllm.planner.plan import Plan, make_plan
from batchllm.planner.store import PromptStore
from batchllm.prompt import Completion, SamplingParams
from batchllm.storage.keys import KeyScope

BLOCK_SIZE = 16

_MORE_DOCUMENTS = 3
_TURN_STEPS = 20

TINY = replace(SMALL, num_kv_heads=1, intermediate_size=128, vocab_size=512, max_context=2048)


@dataclass(frozen=True, slots=True)
class NoVocabulary:
    """Rows run to their `max_tokens`; their text is of no interest."""

    token_bytes: Sequence[bytes]
    eos_ids: frozenset[int] = frozenset()
    special_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """`questions` about each of `documents`; each question is 12 tokens, its answer `output_tokens`."""

    documents: int
    questions: int
    document_tokens: int
    output_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A workload staged for a model."""

    decoder: Decoder
    store: PromptStore
    plan: Plan
    sequences: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: seconds of the loop, CPU seconds in it, seconds of opening the tiers, what was counted, and each row's tokens."""

    run_s: float
    cpu_s: float
    setup_s: float
    metrics: RunMetrics
    stall_s: float
    moved_bytes: int
    tokens: dict[int, list[int]]


def stage(workload: Workload, *, decoder: Decoder, folder: Path) -> Batch:
    """Random documents and questions. Question by question over all documents, so that each document is needed all the time."""
    random = np.random.default_rng(7)
    vocabulary = decoder.config.vocab_size
    documents = random.integers(3, vocabulary, (workload.documents, workload.document_tokens))
    prompts = [
        np.concatenate([documents[document], random.integers(3, vocabulary, 12)])
        for _ in range(workload.questions)
        for document in random.permutation(workload.documents)
    ]
    store = PromptStore(folder)
    sampling = store.intern_sampling(SamplingParams(max_tokens=workload.output_tokens, ignore_eos=True))
    store.append_batch(
        row_index=np.arange(len(prompts)),
        lengths=np.array([prompt.size for prompt in prompts], dtype=np.int32),
        tokens=np.concatenate(prompts).astype(np.int32),
        sampling_ids=np.full(len(prompts), sampling, dtype=np.int32),
    )
    store.finish()
    return Batch(decoder, store, make_plan(store, prefix_sharing=True, keep_order=True), workload.sequences)


class Running:
    """A run of a batch over a pool of `num_blocks` that is under way. Seconds of its loop count while it advances."""

    def __init__(self, batch: Batch, *, num_blocks: int, request: TierRequest | None) -> None:
        self.batch = batch
        self.answers: list[Completion] = []
        self.run_s, self.cpu_s = 0.0, 0.0
        decoder, tiers = batch.decoder, None
        began_s = time.perf_counter()
        if request is not None:
            tiers = open_tiers(
                request,
                scope=KeyScope(model=b"benchmark", layout="benchmark", dtype=str(decoder.dtype)),
                block_bytes=kv_shape(decoder).block_bytes(BLOCK_SIZE),
                block_size=BLOCK_SIZE,
                most_blocks=most_blocks(batch.plan, max_context=decoder.config.max_context, block_size=BLOCK_SIZE),
            )
        self.setup_s = time.perf_counter() - began_s
        self.engine = Engine(
            decoder=decoder,
            vocabulary=NoVocabulary([b"x"] * decoder.config.vocab_size),
            store=batch.store,
            plan=batch.plan,
            config=EngineConfig(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_step_tokens=512,
                max_sequences=batch.sequences,
                evict_least_recent=request is not None and request.policy == "lru",
            ),
            seed=0,
            started_at=time.monotonic(),
            tiers=tiers,
        )

    @property
    def done(self) -> bool:
        return self.engine.scheduler.done

    def advance(self, num_steps: int) -> None:
        """So many steps, or to the end."""
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            if self.done:
                break
            self.answers += self.engine.step()
        self.run_s += time.perf_counter() - began_s
        self.cpu_s += time.process_time() - cpu_began_s

    def finish(self) -> Outcome:
        """Closes the engine. Exits where a row has failed."""
        engine, answers = self.engine, self.answers
        engine.scheduler.check_integrity()
        stall_s, moved_bytes = 0.0, 0
        if engine.mover is not None:
            report = report_tiers(engine.mover, engine.metrics)
            stall_s, moved_bytes = report.stall_s, sum(tier.bytes_in + tier.bytes_out for tier in report.tiers)
        engine.close()
        if engine.metrics.num_errors or len(answers) != self.batch.plan.num_prompts:
            sys.exit(
                f"{engine.metrics.num_errors} rows failed: {next(answer.error for answer in answers if answer.error)}"
            )
        return Outcome(
            self.run_s,
            self.cpu_s,
            self.setup_s,
            engine.metrics,
            stall_s,
            moved_bytes,
            {answer.row_index: answer.token_ids for answer in answers},
        )


def run(batch: Batch, *, num_blocks: int, request: TierRequest | None) -> Outcome:
    """Runs the batch once over a pool of `num_blocks`."""
    running = Running(batch, num_blocks=num_blocks, request=request)
    while not running.done:
        running.advance(1000)
    return running.finish()


def run_in_turns(batch: Batch, ways: dict[str, TierRequest | None], *, num_blocks: int) -> dict[str, Outcome]:
    """Runs the batch in all ways at once, a few steps of each in turn, there and back: what else the machine does meets all alike."""
    running = {name: Running(batch, num_blocks=num_blocks, request=request) for name, request in ways.items()}
    names = list(ways)
    while not all(each.done for each in running.values()):
        for name in (*names, *reversed(names)):
            running[name].advance(_TURN_STEPS)
    return {name: each.finish() for name, each in running.items()}


def compare(
    batch: Batch, ways: dict[str, TierRequest | None], *, rounds: int, in_turns: bool
) -> dict[str, list[Outcome]]:
    """Runs all ways once a round, one after the other or `in_turns`, every other round in reverse; prints a line for each run.

    `unlimited` is the way with room for all.
    """
    num_tokens = int(batch.plan.prompt_tokens.sum() + batch.plan.decode_tokens.sum())
    all_blocks = num_tokens // BLOCK_SIZE + 1
    first = run(batch, num_blocks=all_blocks, request=None)  # warms up, too
    quarter = first.metrics.peak_used_blocks // 4
    outcomes: dict[str, list[Outcome]] = {name: [] for name in ways}
    for number in range(rounds):
        order = dict(list(ways.items())[:: -1 if number % 2 else 1])
        if in_turns:
            these = run_in_turns(batch, order, num_blocks=quarter)
        else:
            these = {
                name: run(batch, num_blocks=all_blocks if name == "unlimited" else quarter, request=request)
                for name, request in order.items()
            }
        for name, outcome in these.items():
            outcomes[name].append(outcome)
            describe(name, outcome, first)
    return outcomes


def describe(name: str, outcome: Outcome, first: Outcome) -> None:
    """Prints a run's line. `first`: whose tokens it should have."""
    metrics = outcome.metrics
    same = sum(outcome.tokens[row] == tokens for row, tokens in first.tokens.items())
    print(
        f"{name:<10}{outcome.run_s:8.3f} s  CPU {outcome.cpu_s:8.3f} s  model {metrics.model_s:7.3f}  schedule {metrics.schedule_s:6.3f}  "
        f"sample {metrics.sample_s:6.3f}  stall {outcome.stall_s:5.2f}  pool {metrics.num_blocks:>6,}  steps {metrics.num_steps:,}  "
        f"computed {metrics.computed_prompt_tokens:>7,}  restored {metrics.restored_tokens:>7,}  "
        f"preempted {metrics.preemptions}  moved {outcome.moved_bytes / 1e6:,.0f} MB  "
        f"same rows {same}/{len(first.tokens)}",
        flush=True,
    )


def ratio(outcomes: dict[str, list[Outcome]], name: str, *, over: str) -> float:
    """Median over rounds of one way's seconds over another's."""
    pairs = zip(outcomes[name], outcomes[over], strict=True)
    return statistics.median(mine.run_s / other.run_s for mine, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--documents", type=int, default=28)
    parser.add_argument("--questions", type=int, default=3)
    parser.add_argument("--document-tokens", type=int, default=192)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--only", choices=["job", "useless"])
    parser.add_argument("--no-disk-figures", action="store_true", help="leave out benchmarks/tiers_disk.py")
    arguments = parser.parse_args()
    workload = Workload(
        documents=arguments.documents,
        questions=arguments.questions,
        document_tokens=arguments.document_tokens,
        output_tokens=arguments.output_tokens,
        sequences=arguments.sequences,
    )
    device = torch.device("cpu")
    kernels = select_kernels(device)
    figures: dict[str, object] = {"benchmark": "tiers", "kernels": kernels.name}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        scratch = Path(name)
        disk = DiskRequest(scratch / "spill", 2 << 30, max_age_s=1e9)
        host_bytes = 2 << 30
        ram = TierRequest(host_bytes=host_bytes, disk=None, policy="next-use", persist=False)
        if arguments.only != "useless":
            source = resolve_model("smollm2-135m", base_folder=Path.cwd())
            decoder = load_decoder(source, dtype=dtype_for("auto", device), device=device, kernels=kernels)
            batch = stage(workload, decoder=decoder, folder=scratch / "job")
            ways = {
                "unlimited": None,
                "ram": ram,
                "disk": TierRequest(host_bytes=0, disk=disk, policy="next-use", persist=False),
                "lru": TierRequest(host_bytes=host_bytes, disk=None, policy="lru", persist=False),
                "recompute": TierRequest(host_bytes=host_bytes, disk=None, policy="recompute", persist=False),
            }
            outcomes = compare(batch, ways, rounds=arguments.rounds, in_turns=False)
            figures |= {
                f"{way}_time_ratio": round(ratio(outcomes, way, over="unlimited"), 4)
                for way in ways
                if way != "unlimited"
            }
            figures["setup_s"] = round(statistics.median(outcome.setup_s for outcome in outcomes["disk"]), 2)
        if arguments.only != "job":
            tiny = Decoder(
                TINY,
                RandomWeights(TINY, scale=0.1),
                dtype=torch.float32,
                device=device,
                kernels=kernels,
                fingerprint="tiny",
            )
            longer = replace(workload, documents=_MORE_DOCUMENTS * workload.documents)
            batch = stage(longer, decoder=tiny, folder=scratch / "useless")
            ways = {"ram": ram, "recompute": TierRequest(host_bytes=0, disk=None, policy="recompute", persist=False)}
            outcomes = compare(batch, ways, rounds=5 * arguments.rounds + 1, in_turns=True)
            figures["useless_tier_time_ratio"] = round(ratio(outcomes, "ram", over="recompute"), 4)
        if not arguments.no_disk_figures and shutil.which("fio"):
            script = Path(__file__).with_name("tiers_disk.py")
            command = [sys.executable, str(script), "--folder", str(scratch)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            print(output, end="")
            measured = json.loads(output.splitlines()[-1])
            figures |= {key: measured[key] for key in ("fio_share_read", "fio_share_write", "cpu_us_per_block")}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
