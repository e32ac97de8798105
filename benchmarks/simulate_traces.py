"""Whole Mooncake traces through `batchllm.planner.simulate`: next use beside LRU and the offline optimum.

    python benchmarks/simulate_traces.py ../shared/data/mooncake_traces [--limit N] [--sequences 1]

Each trace at 10, 25, 50 and 90 % of its working set, split between pool, host and disk. The last line is one JSON object: the
number of cases in which next use hit less or moved more than LRU, and the widest gap to the optimum.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from batchllm.planner.requests import read_trace
from batchllm.planner.simulate import Sizes, simulate

SHARES = (0.10, 0.25, 0.50, 0.90)
SPLITS = {"pool+host": (0.5, 0.5, 0.0), "pool+disk": (0.25, 0.0, 0.75), "all three": (0.2, 0.3, 0.5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, help="the first requests only")
    parser.add_argument("--sequences", type=int, default=1)
    arguments = parser.parse_args()
    num_worse, widest_gap = 0, 0.0
    began_s = time.perf_counter()
    for path in sorted(arguments.folder.glob("*_trace.jsonl")):
        requests = read_trace(path, limit=arguments.limit)
        largest = max(len(request.blocks) + request.num_private for request in requests.requests)
        for share in SHARES:
            for where, (pool, host, disk) in SPLITS.items():
                capacity = int(requests.working_set * share)
                sizes = Sizes(
                    pool=max(arguments.sequences * largest, int(capacity * pool)),
                    host=int(capacity * host),
                    disk=int(capacity * disk),
                    max_sequences=arguments.sequences,
                )
                best, recent = (
                    simulate(requests, sizes=sizes, policy=name, block_bytes=1) for name in ("next-use", "lru")
                )
                gap = best.optimum_rate - best.hit_rate
                is_worse = best.num_hits < recent.num_hits or best.moved_bytes > recent.moved_bytes
                num_worse += is_worse
                widest_gap = max(widest_gap, gap)
                print(
                    f"{path.stem:<20} {share:4.0%} {where:<10} next use {best.hit_rate:7.2%}, LRU {recent.hit_rate:7.2%}, "
                    f"optimum {best.optimum_rate:7.2%} (gap {gap:.2%}); blocks moved {best.moved_bytes:>9,}, LRU "
                    f"{recent.moved_bytes:>9,}{'  WORSE' if is_worse else ''}",
                    flush=True,
                )
    figures = {
        "benchmark": "simulate_traces",
        "num_worse": num_worse,
        "widest_gap": round(widest_gap, 5),
        "seconds": round(time.perf_counter() - began_s, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
