"""How fast this machine is right now: a bf16 matrix product and a stream read, on all its cores.

    python benchmarks/calibration.py

answers each line on standard input with one JSON line: `{"matmul_gflops": …, "stream_gb_per_s": …}`, medians over half a second each.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

_SIDE = 2048
_STREAM_BYTES = 512 << 20
_SECONDS = 0.5


def median_s(work: Callable[[], object]) -> float:
    """Median seconds of `work` over at least five calls and half a second."""
    times: list[float] = []
    until = time.monotonic() + _SECONDS
    while len(times) < 5 or time.monotonic() < until:
        started_at = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_at)
    return statistics.median(times)


def main() -> None:
    left = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16)
    right = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16)
    stream = torch.ones(_STREAM_BYTES // 8, dtype=torch.int64)
    print(json.dumps({"ready": True, "threads": torch.get_num_threads()}), flush=True)
    for _ in sys.stdin:
        matmul_s = median_s(lambda: left @ right)
        stream_s = median_s(lambda: stream.sum())
        rates = {"matmul_gflops": 2 * _SIDE**3 / matmul_s / 1e9, "stream_gb_per_s": _STREAM_BYTES / stream_s / 1e9}
        print(json.dumps(rates), flush=True)


if __name__ == "__main__":
    main()
