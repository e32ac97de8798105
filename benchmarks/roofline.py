"""The least time in which this machine could do a batch, by phase, and the share of it that was reached.

    python benchmarks/roofline.py OUTPUT_FOLDER [--run RUN_ID]     what a finished run recorded of itself
    python benchmarks/roofline.py [--shared 256] [--tokens 64]     a batch now: prompts behind one prefix of 512 tokens

The formula stands in `batchllm/planner/roofline.py`. The machine is measured in the process of the run: best matrix product of a large size in
the run's dtype, best read of 256 MiB with all threads. On a machine that others use both come out too low, and the share too high. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from throughput import PREFIX_TOKENS, run_batch

from batchllm.data.run_folder import recorded_runs
from batchllm.models.decoder import dtype_for
from batchllm.models.loading import load_decoder
from batchllm.models.registry import resolve_model
from batchllm.models.tokenizer import load_tokenizer
from batchllm.ops import select_kernels
from batchllm.planner.roofline import roofline_text


def recorded(output: Path, *, run_id: str | None) -> dict[str, Any]:
    """The figures of the last finished run in `output` that has them, or of the run named."""
    runs = recorded_runs(output)
    if not runs:
        sys.exit(f"{output}: no run is recorded there")
    if run_id is not None:
        runs = [run for run in runs if run.run_id == run_id]
        if not runs:
            sys.exit(f"{output}: no run {run_id} is recorded there")
    finished = [run for run in runs if run.summary.get("status") == "finished"]
    if not finished:
        sys.exit(f"{output}: {'the run has' if run_id is not None else 'its runs have'} not finished")
    reached = [run for run in finished if run.summary.get("roofline")]
    if not reached:
        sys.exit(f"{output}: no finished run there says what it reached: its steps must take half a second or more")
    return {"run_id": reached[-1].run_id} | reached[-1].summary["roofline"]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a batch that runs now: `--shared` prompts behind one prefix, `--own` tokens each, `--tokens` new ones."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = resolve_model(options.model, base_folder=Path.cwd())
    decoder = load_decoder(
        source, dtype=dtype_for(options.dtype, device), device=device, kernels=select_kernels(device)
    )
    random = np.random.default_rng(0)
    vocabulary = decoder.config.vocab_size
    own = random.integers(100, vocabulary, size=(options.shared, options.own), dtype=np.int32)
    own[:, 0] = 100 + np.arange(options.shared)
    prefix = random.integers(100, vocabulary, size=PREFIX_TOKENS, dtype=np.int32)
    prompts = np.concatenate([np.broadcast_to(prefix, (options.shared, PREFIX_TOKENS)), own], axis=1)
    with tempfile.TemporaryDirectory() as name:
        result = run_batch(
            prompts,
            max_tokens=options.tokens,
            decoder=decoder,
            tokenizer=load_tokenizer(source),
            folder=Path(name) / "batch",
        )
    if result["roofline"] is None:
        sys.exit("the batch took less than half a second: ask for more prompts or tokens")
    return {"output_tokens_per_s": result["output_tokens_per_s"]} | result["roofline"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, help="output folder of a finished run")
    parser.add_argument("--run", dest="run_id")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--shared", type=int, default=256)
    parser.add_argument("--own", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    result = measured(options) if options.output is None else recorded(options.output, run_id=options.run_id)
    print(f"{'phase':<10}{'tokens':>12}{'TFLOP':>10}{'GB':>10}{'compute s':>12}{'memory s':>12}  limited by")
    for name in ("prefill", "decode"):
        phase = result[name]
        print(
            f"{name:<10}{phase['tokens']:>12,}{phase['flops'] / 1e12:>10.2f}{phase['num_bytes'] / 1e9:>10.2f}"
            f"{phase['compute_s']:>12.2f}{phase['memory_s']:>12.2f}  {phase['limited_by']}"
        )
    print(
        f"machine: {result['flops_per_s'] / 1e12:.3f} TFLOP/s, {result['bytes_per_s'] / 1e9:.1f} GB/s; "
        f"least {result['least_s']:.2f} s, steps took {result['steps_s']:.2f} s"
    )
    print(roofline_text(result))
    print(json.dumps({"benchmark": "roofline", **result}))


if __name__ == "__main__":
    main()
