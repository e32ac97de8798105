"""Checks every Triton kernel against float64, then times it beside its floor and beside torch's own. One command:

    python benchmarks/gpu.py                the checks, the timings; JSON under benchmarks/results/
    python benchmarks/gpu.py --engine       as well the whole engine with random weights (gpu_engine.py)
    python benchmarks/gpu.py --interpret    the checks alone, at small shapes in Triton's interpreter; needs no GPU

Needs this tree, torch and triton; the engine numpy, llguidance and xxhash besides. Timings are not reported while a check fails. Exit code 1 for a failed check, or
where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"

# Triton chooses its interpreter when it is imported, which the imports below do.
if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

import attention_cases  # noqa: E402
import gpu_timings  # noqa: E402
import kernel_cases as cases  # noqa: E402
import torch  # noqa: E402
from attention_cases import AttentionShape  # noqa: E402

from batchllm import ops  # noqa: E402
from batchllm.kernels import launch  # noqa: E402
from batchllm.kernels.attention import CHUNK  # noqa: E402
from batchllm.kernels.floats import FP8_DTYPE  # noqa: E402


@dataclass(frozen=True, slots=True)
class Check:
    """`error_share`: the largest error in tolerances of the dtype; up to 1 is right."""

    name: str
    error_share: float

    @property
    def passed(self) -> bool:
        return self.error_share <= 1


def checks(device: torch.device, *, small: bool) -> Iterator[Check]:
    """Every kernel once per dtype, and the bits of attention rows. `small`: shapes for the interpreter."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        where = {"dtype": dtype, "device": device}
        num_rows, hidden = (3, 63) if small else (333, 4096)
        share = cases.rms_norm_share(num_rows, hidden, has_residual=True, **where)
        yield Check(f"rms_norm {name}", share)
        yield Check(f"silu_mul {name}", cases.silu_mul_share(num_rows, hidden + 1, **where))
        heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80 if small else 128}
        yield Check(f"rope_write_kv {name}", cases.rope_write_kv_share(num_rows, **heads, **where))
        yield Check(
            f"rope_write_kv {name}, fp8", cases.rope_write_kv_share(num_rows, **heads, kv_dtype=FP8_DTYPE, **where)
        )
        for kind in ("plain", "int8", "fp8"):
            for rows in (5,) if small else (5, 50, 500):
                size = {"out_size": 70, "in_size": 100} if small else {"out_size": 5000, "in_size": 1000}
                yield Check(f"linear {kind} {name}, {rows} rows", cases.linear_share(rows, **size, kind=kind, **where))
                yield Check(
                    f"linear_add {kind} {name}, {rows} rows", cases.linear_add_share(rows, **size, kind=kind, **where)
                )
                share = cases.linear_argmax_share(rows, **size, kind=kind, **where)
                yield Check(f"linear_argmax {kind} {name}, {rows} rows", share)
        for head_dim in (64, 80) if small else (64, 80, 96, 128, 256):
            for kv_dtype in (dtype, FP8_DTYPE):
                lengths = (300, 37, 1) if small else (3000, 520, 37, 1)
                rows_each = (2, 5, 1) if small else (300, 520, 5, 1)
                shape = AttentionShape(lengths, rows_each, 6, 2, head_dim, layout="split")
                share = attention_cases.attention_share(shape, kv_dtype=kv_dtype, **where)
                yield Check(f"attention {head_dim} {name}, KV {str(kv_dtype).removeprefix('torch.')}", share)
            yield Check(f"attention {head_dim} {name}, row bits", row_bits(head_dim, dtype, device, small=small))
        blocks_share = cases.move_blocks_share(7, (3, 2, 1, 4, 5) if small else (32, 2, 8, 16, 128), **where)
        yield Check(f"move_blocks {name}", blocks_share)
    yield Check("sample", cases.sample_share(12, 600 if small else 128256, dtype=torch.float32, device=device))


def row_bits(head_dim: int, dtype: torch.dtype, device: torch.device, *, small: bool) -> float:
    """0 where rows have the same bits private, split, shared and alone; else infinite."""
    lengths, rows_each = ((300, 257), (1, 1)) if small else ((5000, 2100, 777, 2049), (200, 1, 64, 1))
    shared = CHUNK if small else 2 * CHUNK
    shape = AttentionShape(lengths, rows_each, 8, 2, head_dim, layout="shared", shared_length=shared)
    results = attention_cases.layout_results(shape, dtype=dtype, device=device)
    return 0.0 if all(torch.equal(result, results[0]) for result in results) else float("inf")


def engine_check(device: torch.device) -> Check:
    """0 where a small float32 model gives the reference's tokens with the Triton kernels, else infinite."""
    import gpu_engine

    got = gpu_engine.tiny_answers(ops.TRITON, device)
    expected = gpu_engine.tiny_answers(ops.REFERENCE, torch.device("cpu"))
    return Check("engine, tokens of a tiny float32 model", 0.0 if got == expected else float("inf"))


def engine_results() -> list[dict[str, object]]:
    import gpu_engine

    print(f"\n{'engine':<44}{'tokens':>10}{'s':>10}{'tokens/s':>10}")
    results = []
    for result in gpu_engine.run_models(ops.TRITON):
        print(
            f"{result.name:<44}{result.output_tokens:>10}{result.seconds:>10.1f}{result.tokens_per_s:>10.0f}",
            flush=True,
        )
        results.append(asdict(result) | {"tokens_per_s": result.tokens_per_s})
    return results


def report(device: torch.device, results: list[Check], *, with_engine: bool) -> int:
    """Times the kernels, prints the table and writes the JSON."""
    rates = gpu_timings.measure_rates()
    timings = gpu_timings.time_cases(rates)
    name = torch.cuda.get_device_name(device)
    print(
        f"\n{name}: copy {rates.copy_bytes_per_s / 1e9:.0f} GB/s, bf16 product {rates.matmul_flops_per_s / 1e12:.0f}",
        end=" ",
    )
    print(f"TFLOP/s, to the host {rates.host_bytes_per_s / 1e9:.1f} GB/s\n")
    print(f"{'kernel':<44}{'us':>10}{'floor us':>10}{'share':>8}{'torch us':>10}")
    for timing in timings:
        torch_us = "" if timing.torch_s is None else f"{timing.torch_s * 1e6:.1f}"
        row = f"{timing.name:<44}{timing.kernel_s * 1e6:>10.1f}{timing.floor_s * 1e6:>10.1f}{timing.share:>8.0%}"
        print(f"{row}{torch_us:>10}")
    date = datetime.date.today().isoformat()
    document = {
        "date": date,
        "device": name,
        "torch": torch.__version__,
        "triton": launch.triton.__version__,
        "rates": asdict(rates),
        "checks": [asdict(check) for check in results],
        "engine": engine_results() if with_engine else None,
        "timings": [asdict(timing) | {"share": timing.share} for timing in timings],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"gpu-{name.lower().replace(' ', '-')}-{date}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}", file=sys.stderr)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--interpret", action="store_true", help="check small shapes in Triton's interpreter, no timings"
    )
    parser.add_argument("--engine", action="store_true", help="the engine too, with random weights")
    arguments = parser.parse_args()
    small = arguments.interpret
    device = torch.device("cpu" if small else "cuda")
    if launch.triton is None or (not small and not torch.cuda.is_available()):
        missing = "triton is not installed" if not launch.is_installed() else "no CUDA device here"
        print(f"gpu.py: {missing}; nothing was measured", file=sys.stderr)
        return 1
    results = []
    engine_checks = [engine_check(device)] if arguments.engine else []
    for check in itertools.chain(checks(device, small=small), engine_checks):
        results.append(check)
        print(
            f"{'ok' if check.passed else 'WRONG':<6}{check.name:<44}{check.error_share:>8.3f} of the tolerance",
            flush=True,
        )
    num_wrong = sum(not check.passed for check in results)
    if num_wrong:
        print(f"gpu.py: {num_wrong} of {len(results)} checks failed; no timings", file=sys.stderr)
        return 1
    return 0 if small else report(device, results, with_engine=arguments.engine)


if __name__ == "__main__":
    sys.exit(main())
