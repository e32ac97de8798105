"""Measures the native CPU kernels against the physical limits of this machine, in one run.

    python benchmarks/kernels_cpu.py [--quick]

Prints each target beside what was measured and ends with one JSON line. Shares are ratios within the run: the best of
several passes of each side, taken in turn, so that a busy neighbour spoils both alike. Needs about 6 GB of memory;
`--quick` a third, with fewer passes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from batchllm import ops
from batchllm.kernels.attention import CHUNK, AttentionPlan
from batchllm.kernels.between_attention import KvTarget, LayerEnd, LayerStart
from batchllm.kernels.layers import Layer
from batchllm.kernels.native import library as native_library
from batchllm.kernels.native.memory import advise_huge_pages

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
    """`block_table`: one row for each query row, or one for all. `merges`: for each row of the step its partials; none where items write
    their own output."""
    merges = merges or []
    starts = [0]
    for partials in merges:
        starts.append(starts[-1] + len(partials))
    flat = [number for partials in merges for number in partials]
    return AttentionPlan(
        positions=int32(positions),
        tables=torch.arange(len(positions), dtype=torch.int32) % len(block_table),
        block_table=int32(block_table),
        items=int32(items),
        merge_rows=int32(list(range(len(merges)))),
        merge_start=int32(starts),
        merge_partials=int32(flat),
        num_partials=max(flat, default=-1) + 1,
    )


def make_pool(num_blocks: int, *, num_layers: int = NUM_LAYERS) -> torch.Tensor:
    """A bf16 block pool of the model, every page touched."""
    pool = torch.empty(num_blocks, num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16)
    advise_huge_pages(pool)
    block = torch.randn(pool.shape[1:]).bfloat16()
    for number in range(num_blocks):
        pool[number] = block
    return pool


def each_layer(kernels: ops.Kernels, query: torch.Tensor, pool: torch.Tensor, plan: AttentionPlan) -> None:
    for layer in range(pool.shape[1]):
        kernels.attention(query, pool, layer=layer, plan=plan, scale=HEAD_DIM**-0.5)


def measure_decode(kernels: ops.Kernels, *, num_sequences: int, context: int, passes: int) -> dict[str, float]:
    """Decode attention over private contexts beside a plain read of memory: `num_sequences` that end anywhere in the last chunk of
    `context`, as in a batch. One call for all layers, as in a run, whose products are next to nothing; they count as attention's time.
    """
    blocks_each, num_layers = context // BLOCK_SIZE, NUM_LAYERS // 4
    pool = make_pool(num_sequences * blocks_each, num_layers=num_layers)
    table = torch.randperm(num_sequences * blocks_each).reshape(num_sequences, blocks_each)
    lengths = context - CHUNK + torch.arange(1, num_sequences + 1) * CHUNK // num_sequences
    positions = int32(lengths - 1)
    slots = table.gather(1, (lengths[:, None] - 1) // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + (lengths - 1) % BLOCK_SIZE
    plan = make_plan(positions, table, [(row, 1, 0, length, length, -1) for row, length in enumerate(lengths.tolist())])
    layers = kernels.pack_layers(make_layers(kernels, num_layers=num_layers, hidden=HEAD_DIM, feed_forward=HEAD_DIM))
    target = KvTarget(torch.randn(context, HEAD_DIM).sin(), pool, 0, positions, slots, NUM_HEADS)
    hidden = torch.randn(num_sequences, HEAD_DIM).bfloat16()
    buffer = plain_buffer(pool)

    def attend() -> None:
        kernels.to_last_attention(hidden.clone(), layers, eps=1e-5, target=target, plan=plan, scale=HEAD_DIM**-0.5)

    times = best_times({"stream": buffer.sum, "private": attend}, passes=passes)
    read_bytes = int(lengths.sum()) * num_layers * 2 * NUM_KV_HEADS * HEAD_DIM * 2
    stream = buffer.numel() * 4 / times["stream"]
    return {
        "stream_gb_s": stream / 1e9,
        "decode_gb_s": read_bytes / times["private"] / 1e9,
        "decode_bandwidth_share": read_bytes / times["private"] / stream,
    }


def plain_buffer(pool: torch.Tensor) -> torch.Tensor:
    """As many bytes as the pool's in float32, in huge pages as well."""
    buffer = torch.empty(pool.numel() // 2, dtype=torch.float32)
    advise_huge_pages(buffer)
    return buffer.fill_(1.0)


def measure_shared_prefix(kernels: ops.Kernels, *, num_sequences: int, prefix: int, passes: int) -> dict[str, float]:
    """Decode attention over one shared prefix and a position of each sequence's own, beside private reads of as much."""
    blocks_each = prefix // BLOCK_SIZE + 1
    pool = make_pool(num_sequences * blocks_each)
    table = torch.randperm(num_sequences * blocks_each).reshape(num_sequences, blocks_each)
    positions = torch.full((num_sequences,), prefix)
    query = torch.randn(num_sequences, NUM_HEADS, HEAD_DIM).bfloat16()
    rows = range(num_sequences)
    private = make_plan(positions, table, [(row, 1, 0, prefix + 1, prefix + 1, -1) for row in rows])
    shared_table = table.clone()
    shared_table[:, : prefix // BLOCK_SIZE] = table[0, : prefix // BLOCK_SIZE]
    shared = make_plan(
        positions,
        shared_table,
        [(0, num_sequences, 0, prefix, prefix, 0)]
        + [(row, 1, prefix, prefix + 1, prefix + 1, num_sequences + row) for row in rows],
        [[row, num_sequences + row] for row in rows],
    )
    times = best_times(
        {
            "private": lambda: each_layer(kernels, query, pool, private),
            "shared": lambda: each_layer(kernels, query, pool, shared),
        },
        passes=passes,
    )
    return {"shared_prefix_speedup": times["private"] / times["shared"]}


def measure_prefill(kernels: ops.Kernels, *, length: int, passes: int) -> dict[str, float]:
    """Prefill attention of one prompt beside the machine's bf16 matrix rate: the better of oneDNN and the own product,
    square.
    """
    num_blocks = -(-length // BLOCK_SIZE)
    pool = make_pool(num_blocks)
    query = torch.randn(length, NUM_HEADS, HEAD_DIM).bfloat16()
    plan = make_plan(
        torch.arange(length), torch.randperm(num_blocks).reshape(1, -1), [(0, length, 0, length, length, -1)]
    )
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


def run_each(product: Callable[[Any], torch.Tensor], weights: list[Any]) -> None:
    """Each product's output is let go before the next, as in a model: kept, fresh pages would be most of the time."""
    for weight in weights:
        product(weight)


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
                    "torch": partial(run_each, partial(F.linear, x), weights),
                    "own": partial(run_each, partial(kernels.linear, x), packed),
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


def measure_int8(kernels: ops.Kernels, *, passes: int) -> dict[str, dict[str, float]]:
    """The product over int8 weights, rounding its rows included, over the bf16 one's, by shape and rows."""
    result: dict[str, dict[str, float]] = {}
    for name, (out_size, in_size) in LINEAR_SHAPES.items():
        num_copies = max(1, min(8, 50_000_000 // (out_size * in_size)))
        weights = [torch.randn(out_size, in_size).bfloat16() for _ in range(num_copies)]
        plain = [kernels.pack_linear(weight) for weight in weights]
        rounded = [kernels.pack_linear(weight, int8=True) for weight in weights]
        result[name] = {}
        for num_rows in LINEAR_ROWS:
            if 2.0 * num_rows * out_size * in_size > MAX_FLOPS_A_CALL:
                continue
            x = torch.randn(num_rows, in_size).bfloat16()
            times = best_times(
                {
                    "bf16": partial(run_each, partial(kernels.linear, x), plain),
                    "int8": partial(run_each, partial(kernels.linear, x), rounded),
                },
                passes=passes,
            )
            result[name][str(num_rows)] = round(times["bf16"] / times["int8"], 2)
            print(f"  {name:20} {num_rows:5} rows  int8 {result[name][str(num_rows)]:5.2f} x bf16", flush=True)
    return result


def make_layers(
    kernels: ops.Kernels, *, num_layers: int = NUM_LAYERS, hidden: int = HIDDEN, feed_forward: int = FEED_FORWARD
) -> list[Layer]:
    def weight(out_size: int, in_size: int) -> torch.Tensor:
        return (torch.randn(out_size, in_size) / in_size**0.5).bfloat16()

    norm = torch.ones(hidden).bfloat16()
    return [
        Layer(
            LayerStart(norm=norm, qkv=kernels.pack_linear(weight((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, hidden))),
            LayerEnd(
                output=kernels.pack_linear(weight(hidden, NUM_HEADS * HEAD_DIM)),
                norm=norm,
                gate_up=kernels.pack_linear_gated(weight(2 * feed_forward, hidden)),
                down=kernels.pack_linear(weight(hidden, feed_forward)),
            ),
        )
        for _ in range(num_layers)
    ]


def measure_step(kernels: ops.Kernels, *, num_sequences: int, context: int, passes: int) -> dict[str, float]:
    """A decode step of the whole model, and the same matrix products and attention alone: what remains is everything
    else.
    """
    blocks_each = context // BLOCK_SIZE + 1
    pool = make_pool(num_sequences * blocks_each)
    table = torch.randperm(num_sequences * blocks_each).reshape(num_sequences, blocks_each)
    positions = torch.full((num_sequences,), context, dtype=torch.int32)
    slots = table[:, context // BLOCK_SIZE].contiguous() * BLOCK_SIZE + context % BLOCK_SIZE
    items = [(row, 1, 0, context + 1, context + 1, -1) for row in range(num_sequences)]
    plan = make_plan(positions, table, items)
    layers, vocabulary = make_layers(kernels), kernels.pack_linear(torch.randn(VOCABULARY, HIDDEN).bfloat16())
    cos_sin = torch.randn(context + 1, HEAD_DIM).sin()
    target, packed = KvTarget(cos_sin, pool, 0, positions, slots, NUM_HEADS), kernels.pack_layers(layers)
    embedded, rows = torch.randn(num_sequences, HIDDEN).bfloat16(), torch.arange(num_sequences)
    random_query = torch.randn(num_sequences, NUM_HEADS, HEAD_DIM).bfloat16()
    gated = torch.randn(num_sequences, FEED_FORWARD).bfloat16()

    def step() -> None:
        hidden = embedded.clone()
        attended = kernels.to_last_attention(hidden, packed, eps=1e-5, target=target, plan=plan, scale=HEAD_DIM**-0.5)
        assert attended is not None, "the last layer attends"
        hidden = kernels.after_last_attention(hidden, attended, packed, rows=rows, norm=layers[0].start.norm, eps=1e-5)
        kernels.linear_argmax(hidden, vocabulary)

    def products() -> None:
        # The plain ends, so that the fused ones count as everything else.
        for layer in layers:
            kernels.linear(embedded, layer.start.qkv)
            kernels.linear(embedded, layer.end.output)
            kernels.linear(embedded, layer.end.gate_up)
            kernels.linear(gated, layer.end.down)
        kernels.linear_argmax(embedded, vocabulary)

    times = best_times(
        {"step": step, "products": products, "attention": lambda: each_layer(kernels, random_query, pool, plan)},
        passes=passes,
    )
    return {
        "step_s": times["step"],
        "step_products_s": times["products"],
        "step_attention_s": times["attention"],
        "other_share_of_step": 1 - (times["products"] + times["attention"]) / times["step"],
    }


def measure_call(passes: int) -> float:
    """Seconds of Python and ctypes in one call of a kernel: an RMSNorm of one short row."""
    kernels, x = ops.select_kernels(torch.device("cpu")), torch.ones(1, 16)
    return (
        best_times({"call": lambda: [kernels.rms_norm(x, x[0], eps=1e-5) for _ in range(1000)]}, passes=passes)["call"]
        / 1000
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less memory and fewer passes")
    parser.add_argument("--only", choices=["decode", "prefill", "step", "linear", "int8"], help="one part only")
    options = parser.parse_args()
    library = native_library.load()
    kernels = ops.native_kernels()
    if isinstance(library, str) or isinstance(kernels, str):
        print(f"native kernels: {library}", file=sys.stderr)
        return 1
    passes = 3 if options.quick else 7
    num_threads = torch.get_num_threads()
    print(f"{processor_name()}, {num_threads} threads, path {library.path_name()}, torch {torch.__version__}")
    wanted = [options.only] if options.only else ["decode", "prefill", "step", "linear", "int8"]
    measured: dict[str, Any] = {"path": library.path_name(), "threads": num_threads, "call_s": measure_call(passes)}
    num_sequences = 24 if options.quick else 64
    if "decode" in wanted:
        measured |= measure_decode(kernels, num_sequences=4 * num_sequences, context=4 * CHUNK, passes=3 * passes)
        measured |= measure_shared_prefix(kernels, num_sequences=num_sequences, prefix=4 * CHUNK, passes=passes)
    if "prefill" in wanted:
        measured |= measure_prefill(kernels, length=2048, passes=passes)
    if "step" in wanted:
        measured |= measure_step(kernels, num_sequences=num_sequences, context=CHUNK, passes=passes)
    if "linear" in wanted:
        measured["linear_vs_onednn"] = measure_linear(kernels, passes=passes)
    if "int8" in wanted:
        measured["int8_vs_bf16"] = measure_int8(kernels, passes=passes)
    for line in target_lines(measured):
        print(f"{line.name:58} target {line.target:>8}  measured {line.measured:>8}  {'met' if line.met else 'missed'}")
    print(json.dumps({key: round(value, 6) if isinstance(value, float) else value for key, value in measured.items()}))
    return 0


def target_lines(measured: dict[str, Any]) -> list[Line]:
    """The targets whose measurement was taken."""
    targets = [
        ("decode_bandwidth_share", "decode attention, share of a plain read of memory", 0.70, True),
        ("shared_prefix_speedup", "shared prefix of 1,024 over private reads, times", 8.0, True),
        ("prefill_matmul_share", "prefill attention, share of the bf16 matrix rate", 0.30, True),
        ("other_share_of_step", "neither product nor attention, share of a step", 0.10, False),
    ]
    lines = []
    for key, name, target, at_least in targets:
        if key in measured:
            value = measured[key]
            met = value >= target if at_least else value < target
            sign = ">=" if at_least else "<"
            lines.append(Line(name=name, target=f"{sign} {target:.2f}", measured=f"{value:.2f}", met=met))
    return lines


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
