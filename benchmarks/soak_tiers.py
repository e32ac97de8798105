"""Jobs over tiers of random sizes and policies in bad weather, one after the other, for a while: nothing may leak, no row may change.

    python benchmarks/soak_tiers.py [--minutes 20] [--seed 0]

Each job runs a small batch over a tiny random model with a pool, tiers, policy and faults drawn by chance: reads and writes that
fail or fall short, submissions that are refused, completions that come late and out of order, files cut short or overwritten
between steps, blocks kept for the next job. After each the rows are those of an unlimited pool, pool and tiers are whole, every
transfer that began has ended, and the process has as many descriptors and threads as before. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from disk_weather import Weather, open_in
from tiers import BLOCK_SIZE, TINY, Batch, NoVocabulary, Workload, stage

from batchllm.engine.decoder import kv_shape
from batchllm.engine.engine import Engine, EngineConfig
from batchllm.engine.transfer import TierSetup
from batchllm.models.decoder import Decoder
from batchllm.models.random_model import RandomWeights
from batchllm.ops import select_kernels
from batchllm.prompt import Completion
from batchllm.storage.cost import CostTable, Rate
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.host import HostTier
from batchllm.storage.keys import KeyScope, root_key
from batchllm.storage.policy import LruPolicy, NextUsePolicy
from batchllm.storage.store import TieredStore

ROOT = root_key(KeyScope(model=b"soak", layout="soak", dtype="float32"))


@dataclass(slots=True)
class Totals:
    """Over all jobs."""

    num_jobs: int = 0
    restored_tokens: int = 0
    preemptions: int = 0
    num_disk_hits: int = 0
    num_host_hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    num_lost: int = 0


def open_setup(choices: random.Random, *, folder: Path, block_bytes: int) -> TierSetup:
    """Tiers of random sizes, under a random policy, in random weather."""
    host_slots = choices.choice([0, 0, 1, 5, 40, 400])
    disk = None
    persist = False
    if host_slots == 0 or choices.random() < 0.7:
        persist = choices.random() < 0.3
        calm = choices.random() < 0.3
        errors = 0.0 if calm else choices.choice([0.0, 0.01, 0.3])
        weather = Weather(
            read_errors=errors,
            write_errors=errors,
            shorten=0.0 if calm else choices.choice([0.0, 0.1, 0.4]),
            refuse=0.0 if calm else choices.choice([0.0, 0.1]),
            delay_s=0.0 if calm else choices.choice([0.0, 0.002]),
        )
        seed = choices.randrange(1 << 30)
        disk = DiskTier(
            folder,
            fingerprint=ROOT,
            block_bytes=block_bytes,
            num_slots=choices.choice([0, 1, 10, 100, 600]),
            options=DiskOptions(
                persist=persist, depth=choices.choice([1, 4, 32]), retry_after_s=0.01, max_retry_after_s=0.1
            ),
            open_submissions=open_in(weather, seed=seed),
        )
    num_spare = choices.choice([1, 2, 64]) if disk is not None else 0
    store = TieredStore(
        host=HostTier(num_slots=host_slots, block_bytes=block_bytes, num_spare=num_spare),
        disk=disk,
        make_policy=choices.choice([NextUsePolicy, LruPolicy]),
    )
    costs = CostTable(dict.fromkeys((Rate.COPY_IN, Rate.COPY_OUT, Rate.DISK_READ, Rate.DISK_WRITE), 1e15))
    return TierSetup(store=store, costs=costs, root=ROOT, persist=persist)


def run_job(batch: Batch, choices: random.Random, *, folder: Path, totals: Totals) -> dict[int, list[int]]:
    """One job; the tokens of its rows. AssertionError where something is lost."""
    setup = open_setup(choices, folder=folder, block_bytes=kv_shape(batch.decoder).block_bytes(BLOCK_SIZE))
    engine = Engine(
        decoder=batch.decoder,
        vocabulary=NoVocabulary([b"x"] * TINY.vocab_size),
        store=batch.store,
        plan=batch.plan,
        config=EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=choices.randrange(8, 60),
            max_step_tokens=choices.choice([16, 64, 256]),
            max_sequences=choices.choice([1, 3, 8]),
            evict_least_recent=choices.random() < 0.3,
        ),
        seed=0,
        started_at=time.monotonic(),
        tiers=setup,
    )
    answers: list[Completion] = []
    scheduler, mover = engine.scheduler, engine.mover
    assert mover is not None
    force = choices.random() < 0.3
    while not scheduler.done:
        answers += engine.step()
        if force and choices.random() < 0.05 and not scheduler.done:
            running = scheduler.table.running[~scheduler.table.is_restoring[scheduler.table.running]]
            if running.size:
                scheduler.preempt(int(choices.choice(running.tolist())))
        if choices.random() < 0.01:
            for path in folder.iterdir():
                os.truncate(path, choices.choice([0, 4096, path.stat().st_size // 2]))
    deadline_s = time.monotonic() + 30
    while scheduler.num_in_flight or mover.store.num_in_flight:
        assert time.monotonic() < deadline_s, "the tiers do not come to rest"
        scheduler.wait(0.1)
    scheduler.wait(0.0)
    scheduler.check_integrity()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks, "blocks are lost"
    mover.store.check_integrity()
    engine.close()
    for tier in (mover.store.host, mover.store.disk):
        assert tier is None or tier.counters.num_in_flight == 0, "a transfer has not ended"
    assert all(answer.error is None for answer in answers)
    totals.num_jobs += 1
    totals.restored_tokens += engine.metrics.restored_tokens
    totals.preemptions += engine.metrics.preemptions
    counters = mover.store.counters
    totals.num_host_hits += counters.num_host_hits
    totals.num_disk_hits += counters.num_disk_hits
    totals.num_lost += counters.num_lost
    for cause, count in counters.misses.items():
        totals.misses[cause.value] = totals.misses.get(cause.value, 0) + count
    return {answer.row_index: answer.token_ids for answer in answers}


def process_state() -> dict[str, int]:
    """What a leak would raise."""
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("batchllm.storage").setLevel(logging.ERROR)  # the weather is ours
    choices, totals = random.Random(arguments.seed), Totals()
    device = torch.device("cpu")
    decoder = Decoder(
        TINY,
        RandomWeights(TINY, scale=0.1),
        dtype=torch.float32,
        device=device,
        kernels=select_kernels(device),
        fingerprint="soak",
    )
    ends_s = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spill").mkdir()
        workload = Workload(documents=4, questions=3, document_tokens=72, output_tokens=10, sequences=4)
        batch = stage(workload, decoder=decoder, folder=folder / "job")
        calm = Engine(
            decoder=decoder,
            vocabulary=NoVocabulary([b"x"] * TINY.vocab_size),
            store=batch.store,
            plan=batch.plan,
            config=EngineConfig(block_size=BLOCK_SIZE, num_blocks=500, max_step_tokens=64, max_sequences=4),
            seed=0,
            started_at=time.monotonic(),
        )
        answers: list[Completion] = []
        calm.run(deliver=answers.extend)
        expected = {answer.row_index: answer.token_ids for answer in answers}
        run_job(batch, choices, folder=folder / "spill", totals=totals)
        before, rss_before_kb = process_state(), 0
        while time.monotonic() < ends_s:
            number = totals.num_jobs
            rows = run_job(batch, choices, folder=folder / "spill", totals=totals)
            assert rows == expected, f"job {number} of seed {arguments.seed} has other rows"
            assert process_state() == before, (
                f"job {number} of seed {arguments.seed}: {before} became {process_state()}"
            )
            if totals.num_jobs == 50:
                rss_before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if totals.num_jobs % 100 == 0:
                print(f"{totals.num_jobs} jobs, {totals.restored_tokens:,} tokens restored", flush=True)
    figures = {
        "benchmark": "soak_tiers",
        "minutes": arguments.minutes,
        "seed": arguments.seed,
        **{name: getattr(totals, name) for name in Totals.__dataclass_fields__},
        **before,
        "rss_growth_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_before_kb) / 1024
        if rss_before_kb
        else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
