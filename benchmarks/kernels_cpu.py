"""Measures the native CPU kernels against the physical limits of this machine, in one run.

    python benchmarks/kernels_cpu.py [--quick]

Prints each target beside what was measured and ends with one JSON line. Shares are ratios within the run: the best of several passes of
each side, taken in turn, so that a busy neighbour spoils both alike. Needs about 6 GB of memory; `--quick` a third, with fewer passes.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from batchllm import ops
from batchllm.kernels.attention import CHUNK, AttentionPlan
from batchllm.kernels.native import library as native_library

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, FEED_FORWARD, VOCABULARY = 30, 9, 3, 64, 576, 1536, 49152
"""SmolLM2-135M."""

LINEAR_SHAPES = {
    "smollm2 qkv": (960, 576),
    "smollm2 o": (576, 576),
    "smollm2 gate_up": (3072, 576),
    "smollm2 down": (576, 1536),
    "smollm2 vocabulary": (49152, 576),
    "llama-3-8b qkv": (6144, 4096),
    "llama-3-8b o": (4096, 4096),
    "llama-3-8b gate_up": (28672, 4096),
    "llama-3-8b down": (4096, 14336),
}
LINEAR_ROWS = (1, 16, 64, 128, 512, 2048)
MAX_FLOPS_A_CALL = 1.6e11
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Line:
    """One target with what was measured."""

    name: str
    target: str
    measured: str
    met: bool


def best_times(functions: dict[str, Callable[[], Any]], *, passes: int) -> dict[str, float]:
    """Seconds of the fastest pass of each function; the functions take turns, one pass before is not counted."""
    best = dict.fromkeys(functions, float("inf"))
    for number in range(passes + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def make_plan(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    items: list[tuple[int, ...]],
    merges: list[list[int]] | None = None,
) -> AttentionPlan:
    """`merges`: for each row of the step its partials; none where items write their own output."""
    merges = merges or []
    starts = [0]
    for partials in merges:
        starts.append(starts[-1] + len(partials))
    flat = [number for partials in merges for number in partials]
    return AttentionPlan(
        positions=int32(positions),
        block_table=int32(block_table),
        items=int32(items),
        merge_rows=int32(list(range(len(merges)))),
        merge_start=int32(starts),
        merge_partials=int32(flat),
        num_partials=max(flat, default=-1) + 1,
    )


def make_pool(num_blocks: int) -> torch.Tensor:
    """A bf16 block pool of the model, every page touched."""
    pool = torch.empty(num_blocks, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16)
    block = torch.randn(pool.shape[1:]).bfloat16()
    for number in range(num_blocks):
        pool[number] = block
    return pool


def each_layer(kernels: ops.Kernels, query: torch.Tensor, pool: torch.Tensor, plan: AttentionPlan) -> None:
    for layer in range(NUM_LAYERS):
        kernels.attention(query, pool, layer=layer, plan=plan, scale=HEAD_DIM**-0.5)


def measure_decode(kernels: ops.Kernels, *, num_sequences: int, context: int, passes: int) -> dict[str, float]:
    """Decode attention over private contexts and over one shared prefix, beside a plain read of memory."""
    blocks_each = context // BLOCK_SIZE + 1
    pool = make_pool(num_sequences * blocks_each)
    table = torch.randperm(num_sequences * blocks_each).reshape(num_sequences, blocks_each)
    positions = torch.full((num_sequences,), context)
    query = torch.randn(num_sequences, NUM_HEADS, HEAD_DIM).bfloat16()
    rows = range(num_sequences)
    private = make_plan(positions, table, [(row, 1, 0, context + 1, row, -1) for row in rows])
    shared = make_plan(
        positions,
        table,
        [(0, num_sequences, 0, context, 0, 0)]
        + [(row, 1, context, context + 1, row, num_sequences + row) for row in rows],
        [[row, num_sequences + row] for row in rows],
    )
    buffer = torch.ones(pool.numel() // 2, dtype=torch.float32)
    times = best_times(
        {
            "stream": buffer.sum,
            "private": lambda: each_layer(kernels, query, pool, private),
            "shared": lambda: each_layer(kernels, query, pool, shared),
        },
        passes=passes,
    )
    read_bytes = num_sequences * (context + 1) * NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 2
    stream = buffer.numel() * 4 / times["stream"]
    return {
        "stream_gb_s": stream / 1e9,
        "decode_gb_s": read_bytes / times["private"] / 1e9,
        "decode_bandwidth_share": read_bytes / times["private"] / stream,
        "shared_prefix_speedup": times["private"] / times["shared"],
    }


def measure_prefill(kernels: ops.Kernels, *, length: int, passes: int) -> dict[str, float]:
    """Prefill attention of one prompt beside the machine's bf16 matrix rate: the better of oneDNN and the own product, square."""
    num_blocks = -(-length // BLOCK_SIZE)
    pool = make_pool(num_blocks)
    query = torch.randn(length, NUM_HEADS, HEAD_DIM).bfloat16()
    plan = make_plan(torch.arange(length), torch.randperm(num_blocks).reshape(1, -1), [(0, length, 0, length, 0, -1)])
    size = 2048
    x, weight = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16()
    packed = kernels.pack_linear(weight)
    times = best_times(
        {
            "attention": lambda: kernels.attention(query, pool, layer=0, plan=plan, scale=HEAD_DIM**-0.5),
            "torch": lambda: F.linear(x, weight),
            "own": lambda: kernels.linear(x, packed),
        },
        passes=passes,
    )
    flops = 4 * HEAD_DIM * NUM_HEADS * length * (length + 1) / 2
    rate = 2 * size**3 / min(times["torch"], times["own"])
    return {
        "matmul_gflops": rate / 1e9,
        "matmul_torch_gflops": 2 * size**3 / times["torch"] / 1e9,
        "prefill_gflops": flops / times["attention"] / 1e9,
        "prefill_matmul_share": flops / times["attention"] / rate,
    }


def measure_linear(kernels: ops.Kernels, *, passes: int) -> dict[str, dict[str, float]]:
    """The own bf16 product over oneDNN's, by shape and rows. Several weights in turn, as the layers of a model are."""
    result: dict[str, dict[str, float]] = {}
    for name, (out_size, in_size) in LINEAR_SHAPES.items():
        num_copies = max(1, min(8, 50_000_000 // (out_size * in_size)))
        weights = [torch.randn(out_size, in_size).bfloat16() for _ in range(num_copies)]
        packed = [kernels.pack_linear(weight) for weight in weights]
        result[name] = {}
        for num_rows in LINEAR_ROWS:
            flops = 2.0 * num_rows * out_size * in_size
            if flops > MAX_FLOPS_A_CALL:
                continue
            x = torch.randn(num_rows, in_size).bfloat16()
            times = best_times(
                {
                    "torch": lambda x=x, weights=weights: [F.linear(x, weight) for weight in weights],
                    "own": lambda x=x, packed=packed: [kernels.linear(x, one) for one in packed],
                },
                passes=passes,
            )
            result[name][str(num_rows)] = round(times["torch"] / times["own"], 2)
            rate = flops * num_copies / times["own"] / 1e9
            print(
                f"  {name:20} {num_rows:5} rows {rate:8.0f} GFLOP/s  {result[name][str(num_rows)]:5.2f} x oneDNN",
                flush=True,
            )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less memory and fewer passes")
    parser.add_argument(
        "--only", choices=["decode", "prefill", "step", "linear"], help="one part only, without the JSON line"
    )
    options = parser.parse_args()
    library = native_library.load()
    kernels = ops.native_kernels()
    if isinstance(library, str) or isinstance(kernels, str):
        print(f"native kernels: {library}", file=sys.stderr)
        return 1
    passes = 3 if options.quick else 7
    print(
        f"{processor_name()}, {torch.get_num_threads()} threads, path {library.path_name()}, torch {torch.__version__}"
    )
    if options.only in (None, "decode"):
        decode = measure_decode(kernels, num_sequences=24 if options.quick else 64, context=4 * CHUNK, passes=passes)
        print(decode, flush=True)
    if options.only in (None, "prefill"):
        prefill = measure_prefill(kernels, length=2048, passes=passes)
        print(prefill, flush=True)
    if options.only in (None, "linear"):
        linear = measure_linear(kernels, passes=passes)
    return 0


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
