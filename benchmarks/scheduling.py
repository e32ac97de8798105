"""What deciding a step costs, without a model: milliseconds by sequences that run and rows that wait.

    python benchmarks/scheduling.py [--running 100,1000,10000] [--waiting 1000,10000,100000,1000000] [--steps 40]

Rows come in documents of eight with a common prefix of 64 tokens, and generate 8 to 120 tokens each, so that in each step some end and as many
begin. A step is what the engine does beside the model and sampling: `Scheduler.schedule`, `build_step` (rows and the attention plan), `append`
and `finish`. Printed are the middle step and, of steps in which nobody begins or ends, the middle one. Wanted: the same however
many rows wait, and under a millisecond a step for each thousand that run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from batchllm.engine.holdings import SchedulerConfig, WaitingSequence
from batchllm.engine.scheduler import Scheduler
from batchllm.engine.step import build_step
from batchllm.planner.plan import Plan
from batchllm.planner.tree import PrefixTree

DOCUMENT_ROWS, DOCUMENT_TOKENS, OWN_TOKENS = 8, 64, 24
FEWEST_TOKENS, MOST_TOKENS = 8, 120
BLOCK_SIZE, CHUNK = 16, 256
WANTED_MS = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of the middle step, `steady` where rows begin and end, `decoding` where none does; and of the parts of a steady one."""

    running: int
    waiting: int
    steady_ms: float
    decoding_ms: float
    schedule_ms: float
    build_ms: float
    append_ms: float


def make_plan(num_rows: int) -> Plan:
    """The plan of `num_rows` rows, made as a sort would find it."""
    num_documents = num_rows // DOCUMENT_ROWS
    positions = np.arange(num_rows, dtype=np.int64)
    first = np.arange(num_documents, dtype=np.int64) * DOCUMENT_ROWS
    prompt_tokens = np.full(num_rows, DOCUMENT_TOKENS + OWN_TOKENS, dtype=np.int32)
    return Plan(
        order=positions,
        tree=PrefixTree(
            parent=np.full(num_documents, -1, dtype=np.int32),
            start=np.zeros(num_documents, dtype=np.int32),
            end=np.full(num_documents, DOCUMENT_TOKENS, dtype=np.int32),
            first=first,
            last=first + DOCUMENT_ROWS,
            leaf_node=(positions // DOCUMENT_ROWS).astype(np.int32),
        ),
        tree_position=positions,
        shared_tokens=np.where(positions % DOCUMENT_ROWS, DOCUMENT_TOKENS, 0).astype(np.int32),
        prompt_tokens=prompt_tokens,
        decode_tokens=np.full(num_rows, MOST_TOKENS, dtype=np.int32),
    )


def make_scheduler(*, running: int, num_rows: int, fewest_tokens: int) -> Scheduler:
    """A scheduler before its first step, with room for `running` sequences, which generate `fewest_tokens` to `MOST_TOKENS` each."""
    prompt = np.arange(DOCUMENT_TOKENS + OWN_TOKENS, dtype=np.int32)
    lengths = np.random.default_rng(0).integers(fewest_tokens, MOST_TOKENS + 1, size=4096).tolist()

    def load(position: int) -> WaitingSequence:
        tokens = prompt.copy()
        tokens[:DOCUMENT_TOKENS] += position // DOCUMENT_ROWS
        tokens[DOCUMENT_TOKENS:] += position
        most = tokens.size + lengths[position % len(lengths)]
        return WaitingSequence(position=position, tokens=tokens, prompt_length=tokens.size, max_tokens=most)

    most_tokens = DOCUMENT_TOKENS + OWN_TOKENS + MOST_TOKENS
    return Scheduler(
        config=SchedulerConfig(
            block_size=BLOCK_SIZE, max_step_tokens=4 * running, max_sequences=running, max_context=most_tokens
        ),
        plan=make_plan(num_rows),
        num_blocks=running * (most_tokens // BLOCK_SIZE + 2),
        load=load,
    )


def time_steps(scheduler: Scheduler, *, num_warm: int, num_steps: int) -> list[tuple[float, float, float]]:
    """Milliseconds to schedule, build and end each of `num_steps` steps behind the first `num_warm`."""
    table = scheduler.table
    parts: list[tuple[float, float, float]] = []
    gc.collect()
    gc.freeze()
    for _ in range(num_warm + num_steps):
        begun_at = time.perf_counter()
        step = scheduler.schedule()
        scheduled_at = time.perf_counter()
        batch = build_step(step, scheduler, chunk=CHUNK)
        built_at = time.perf_counter()
        slots = batch.sample_slots
        scheduler.append(slots, np.full(slots.size, 7, dtype=np.int64))
        scheduler.finish(slots[table.num_tokens[slots] >= table.max_tokens[slots]])
        ended_at = time.perf_counter()
        parts.append((1e3 * (scheduled_at - begun_at), 1e3 * (built_at - scheduled_at), 1e3 * (ended_at - built_at)))
    gc.unfreeze()
    return parts[num_warm:]


def measure(*, running: int, waiting: int, num_steps: int) -> Cost:
    """`running` sequences run all the while, and at least `waiting` rows wait."""
    # All have begun, and then one in MOST_TOKENS steps or fewer ends.
    num_warm = MOST_TOKENS
    num_begun = running * (2 + 2 * (num_warm + num_steps) // (FEWEST_TOKENS + MOST_TOKENS))
    num_rows = -(-(num_begun + waiting) // DOCUMENT_ROWS) * DOCUMENT_ROWS
    scheduler = make_scheduler(running=running, num_rows=num_rows, fewest_tokens=FEWEST_TOKENS)
    steady = time_steps(scheduler, num_warm=num_warm, num_steps=num_steps)
    assert scheduler.table.num_running > 0.9 * running and scheduler.num_waiting >= waiting
    all_alike = make_scheduler(running=running, num_rows=num_rows, fewest_tokens=MOST_TOKENS)
    decoding = time_steps(all_alike, num_warm=MOST_TOKENS - num_steps - 10, num_steps=num_steps)
    assert all_alike.table.num_running == running
    schedule_ms, build_ms, append_ms = (statistics.median(part) for part in zip(*steady, strict=True))
    return Cost(
        running=running,
        waiting=waiting,
        steady_ms=statistics.median(map(sum, steady)),
        decoding_ms=statistics.median(map(sum, decoding)),
        schedule_ms=schedule_ms,
        build_ms=build_ms,
        append_ms=append_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="100,1000,10000")
    parser.add_argument("--waiting", default="1000,10000,100000,1000000")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    costs: list[Cost] = []
    print("  running     waiting   decoding ms   with rows that begin and end: ms   schedule   build   append")
    for running in map(int, options.running.split(",")):
        for waiting in map(int, options.waiting.split(",")):
            cost = measure(running=running, waiting=waiting, num_steps=options.steps)
            costs.append(cost)
            print(
                f"{running:>9,} {waiting:>11,} {cost.decoding_ms:>13.2f} {cost.steady_ms:>34.2f} "
                f"{cost.schedule_ms:>10.2f} {cost.build_ms:>7.2f} {cost.append_ms:>8.2f}",
                flush=True,
            )
    widest = [cost for cost in costs if cost.running == max(cost.running for cost in costs)]
    print(
        json.dumps(
            {
                "benchmark": "scheduling",
                "costs": [{key: round(value, 3) for key, value in asdict(cost).items()} for cost in costs],
                "decoding_ms_per_thousand": round(1e3 * max(cost.decoding_ms / cost.running for cost in widest), 3),
                "steady_ms_per_thousand": round(1e3 * max(cost.steady_ms / cost.running for cost in widest), 3),
                "most_waiting_over_fewest": round(widest[-1].steady_ms / widest[0].steady_ms, 3),
                "wanted_ms_per_thousand": WANTED_MS,
            }
        )
    )


if __name__ == "__main__":
    main()
