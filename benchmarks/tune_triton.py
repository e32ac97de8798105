"""Remeasures the tuning table for the GPU at hand and writes `kernels/tuning.json`; jobs only ever read it.

    python benchmarks/tune_triton.py                                every entry: hours, most of them compilation
    python benchmarks/tune_triton.py attention:half/128 rms_norm    one entry, and one operation's entries

Each candidate that compiles and fits the device is timed at shapes of Llama-3-8B. The winner replaces the entry of
this device's class and no other. Afterwards run `pytest tests/kernels/test_aot.py`, which refuses winners that spill
registers: a class serves more than one device, and more than one version of Triton.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

import gpu_timings  # noqa: E402
import kernel_cases  # noqa: E402
import torch  # noqa: E402
from attention_cases import AttentionShape  # noqa: E402

from batchllm.kernels import activation, blocks, launch, linear, norm, rope, sampling, tuning  # noqa: E402
from batchllm.kernels.floats import FP8_DTYPE  # noqa: E402

Run = Callable[[], object]

CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "attention": {
        "tile_rows": (16, 32, 64, 128),
        "tile_keys": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (3, 5),
        "programs_per_processor": (1, 2),
    },
    "linear": {
        "tile_rows": (16, 64, 128),
        "tile_columns": (32, 64, 128, 256),
        "tile_depth": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (3, 4, 5),
    },
    "rms_norm": {"num_warps": (1, 2, 4, 8, 16)},
    "silu_mul": {"block": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)},
    "rope_write_kv": {"tile_heads": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8)},
    "move_blocks": {"block": (1024, 4096, 16384), "num_warps": (4, 8)},
    "sample": {"block": (1024, 2048, 4096), "search_block": (256, 512, 1024), "num_warps": (4, 8, 16)},
}
"""Values to combine, per operation. A tile of keys must divide the chunk of attention, which all of these do."""


def candidates(operation: str) -> Iterator[dict[str, int]]:
    names = CANDIDATES[operation]
    for values in itertools.product(*names.values()):
        yield dict(zip(names, values, strict=True))


def runs(operation: str, shape_class: str) -> list[Run]:
    """What is timed for one entry of the table. Several runs count by their geometric mean."""
    kind, _, size = shape_class.partition("/")
    device, dtype = torch.device("cuda"), torch.float32 if kind == "float" else torch.bfloat16
    if operation == "attention":
        # The same configuration decodes and prefills, with or without 8-bit KV: bits must not depend on which.
        decode = AttentionShape((1024,) * 128, (1,) * 128, 32, 8, int(size), num_layers=1)
        prefill = AttentionShape((1024,) * 4, (1024,) * 4, 32, 8, int(size), num_layers=1)
        cases = [gpu_timings.attention_case("", shape, dtype=dtype) for shape in (decode, prefill)]
        cases.append(gpu_timings.attention_case("", decode, dtype=dtype, kv_dtype=FP8_DTYPE))
        return [case.run for case in cases]
    if operation == "linear":
        num_rows = int(size)
        weight_kind = kind if kind in ("int8", "fp8") else "plain"
        packed = kernel_cases.packed_weight(14336, 4096, kind=weight_kind, dtype=dtype, device=device, has_bias=False)
        x = torch.randn(num_rows, 4096, dtype=dtype, device=device)
        argmax = functools.partial(linear.linear_argmax_triton, x, packed)
        # A plain weight's product is torch's own: only the argmax uses the entry.
        return [argmax] if packed.scale is None else [argmax, functools.partial(linear.linear_triton, x, packed)]
    if operation == "rms_norm":
        x = torch.randn(4096, int(size), dtype=dtype, device=device)
        return [functools.partial(norm.rms_norm_triton, x, x[0].clone(), eps=1e-5, residual=x.clone())]
    if operation == "silu_mul":
        return [
            functools.partial(activation.silu_mul_triton, torch.randn(n, 28672, dtype=dtype, device=device))
            for n in (64, 4096)
        ]
    if operation == "rope_write_kv":
        return [rope_run(num_rows) for num_rows in (64, 4096)]
    if operation == "move_blocks":
        kv = torch.empty(256, 32, 2, 8, 16, 128, dtype=dtype, device=device)
        ids = torch.randperm(256, device=device)[:64]
        return [functools.partial(blocks.gather_blocks_triton, kv, ids, torch.empty_like(kv[:64]))]
    assert operation == "sample", operation
    logits = 4 * torch.randn(96, 128256, device=device)
    return [functools.partial(sampling.sample_triton, logits, kernel_cases.sampling_batch(96, device=device))]


def rope_run(num_rows: int) -> Run:
    device, dtype = torch.device("cuda"), torch.bfloat16
    return functools.partial(
        rope.rope_write_kv_triton,
        torch.randn(num_rows, 48 * 128, dtype=dtype, device=device),
        torch.randn(4096, 128, device=device),
        torch.empty(num_rows // 16, 1, 2, 8, 16, 128, dtype=dtype, device=device),
        layer=0,
        positions=torch.randint(0, 4096, (num_rows,), dtype=torch.int32, device=device),
        slots=torch.randperm(num_rows, device=device),
        num_heads=32,
    )


def mean_s(measured: list[float]) -> float:
    """Geometric mean of seconds."""
    return float(torch.tensor(measured, dtype=torch.float64).log().mean().exp())


def tune(table: tuning.Table, operation: str, shape_class: str, device_class: str) -> None:
    """Leaves the fastest configuration in `table`, the present one where no candidate beats it."""
    entries = table[device_class][operation]
    present = dict(entries[shape_class])
    measured_runs = runs(operation, shape_class)
    best, best_s = present, mean_s([gpu_timings.measure(run) for run in measured_runs])
    print(f"{operation} {shape_class}: {best_s * 1e6:.1f} us now", flush=True)
    for candidate in candidates(operation):
        entries[shape_class] = candidate
        try:
            seconds = mean_s([gpu_timings.measure(run, num_runs=5) for run in measured_runs])
        except launch.triton.TritonError as error:
            print(f"  {candidate}: {(str(error).splitlines() or [type(error).__name__])[0]}", file=sys.stderr)
            continue
        if seconds < best_s:
            best, best_s = candidate, seconds
            print(f"  {best_s * 1e6:.1f} us with {candidate}", flush=True)
    entries[shape_class] = best


def format_table(table: tuning.Table) -> str:
    """The table as JSON with one line a configuration, so that a change shows as one line."""
    classes = []
    for device_class, operations in table.items():
        parts = []
        for operation, entries in operations.items():
            lines = ",\n".join(f'      "{name}": {json.dumps(config)}' for name, config in entries.items())
            parts.append(f'    "{operation}": {{\n{lines}\n    }}')
        classes.append(f'  "{device_class}": {{\n' + ",\n".join(parts) + "\n  }")
    return "{\n" + ",\n".join(classes) + "\n}\n"


def chosen(names: list[str], entries: dict[str, dict[str, tuning.Config]]) -> list[tuple[str, str]]:
    """The (operation, shape class) that `names` mean; ValueError for a name that means none."""
    every = [(operation, shape_class) for operation in CANDIDATES for shape_class in entries[operation]]
    if not names:
        return every
    unknown = [name for name in names if not any(name in (op, f"{op}:{shape}") for op, shape in every)]
    if unknown:
        raise ValueError(f"the tuning table has no {', '.join(unknown)}")
    return [(op, shape) for op, shape in every if op in names or f"{op}:{shape}" in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="operations, or entries as operation:shape; all when none is named")
    names = parser.parse_args().names
    if launch.triton is None or launch.is_interpreted() or not torch.cuda.is_available():
        print("tune_triton.py: needs triton and a CUDA device; nothing was measured", file=sys.stderr)
        return 1
    table = tuning.load_table()
    device_class = tuning.describe_device(torch.device("cuda")).device_class
    try:
        entries = chosen(names, table[device_class])
    except ValueError as error:
        parser.error(str(error))
    for operation, shape_class in entries:
        tune(table, operation, shape_class, device_class)
        # Written as it goes: an hour of measuring is not lost to an interruption.
        tuning.TABLE_PATH.write_text(format_table(table), encoding="utf-8")
    print(f"written to {tuning.TABLE_PATH}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
