"""Peak memory of a large job: 200,000 rows of 8 KB through the whole run, with a model that computes nothing.

    python benchmarks/memory.py [--rows 200000] [--kilobytes 8]

Reading, rendering, staging, planning, scheduling, sampling and writing are the program's own; the weights, the tokenizer and the forward
pass are stand-ins, so that memory is that of the rows. A thread samples the resident memory. The last line is one JSON object: the peak,
and the mean in each quarter of the time; the run is flat when the last quarters are no higher than the ones before. Target: a peak below 1.5 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import batchllm.run_engine as engine_module
import batchllm.run_job as run_module
from batchllm.job import load_job
from batchllm.kernels.attention import AttentionPlan
from batchllm.models.source import ModelSource
from batchllm.ops import REFERENCE, Kernels

VOCABULARY = 4096
CONTEXT = 8192
ROWS_AT_ONCE = 1000
TARGET_BYTES = 1_500_000_000
JOB = """\
name: memory
model: stand-in
input: {path: rows.parquet, id: id}
prompt: {raw: true, template: "Read this: {{ text }}"}
sampling: {max_tokens: 4, ignore_eos: true}
output: {path: out}
engine: {device: cpu, dtype: fp32, max_step_tokens: 65536, max_sequences: 64}
"""


@dataclass(frozen=True)
class StandInConfig:
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 8
    vocab_size: int = VOCABULARY
    max_context: int = CONTEXT


@dataclass
class StandInDecoder:
    """Every row's next token follows from its last one; keys and values stay unwritten."""

    fingerprint: str = "stand-in"
    config: StandInConfig = field(default_factory=StandInConfig)
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kernels: Kernels = REFERENCE

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        plan: AttentionPlan,
        kv: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        return token_ids[sample_rows].float().unsqueeze(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        following = (hidden.long() * 31 + 7) % VOCABULARY
        return -(torch.arange(VOCABULARY) - following).abs().float()

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden[:, 0].long() * 31 + 7) % VOCABULARY


class StandInTokenizer:
    """Four bytes a token, about what English gives."""

    bos_id = None
    add_bos = False
    eos_ids = frozenset({0})
    chat_template = None
    special_tokens: dict[str, int] = {}
    token_bytes = [b"text "] * VOCABULARY

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]:
        encoded = [text.encode() for text in texts]
        return [
            (np.frombuffer(data[: len(data) // 4 * 4], dtype="<u4") % VOCABULARY).astype(np.int32) for data in encoded
        ]


def make_rows(path: Path, *, num_rows: int, num_bytes: int) -> None:
    """Texts that differ from their first words on, in row groups of a few megabytes."""
    random = np.random.default_rng(0)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1) as writer:
        for begin in range(0, num_rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, num_rows - begin)
            letters = random.integers(97, 123, size=(count, num_bytes), dtype=np.uint8)
            texts = [row.tobytes().decode() for row in letters]
            writer.write_table(pa.table({"id": np.arange(begin, begin + count), "text": texts}, schema=schema))


class MemoryWatch:
    """Samples this process's resident memory ten times a second between `start` and `stop`."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def quarters(self) -> list[int]:
        """Mean bytes in each quarter of the time."""
        begin, end = self.samples[0][0], self.samples[-1][0]
        part = [min(3, int(4 * (at - begin) / max(end - begin, 1e-9))) for at, _ in self.samples]
        groups = [[size for (_, size), place in zip(self.samples, part, strict=True) if place == n] for n in range(4)]
        return [int(np.mean(group)) if group else 0 for group in groups]

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm", encoding="ascii") as file:
            while not self._over.wait(0.1):
                file.seek(0)
                self.samples.append((time.monotonic(), int(file.read().split()[1]) * page))


def put_stand_ins() -> None:
    """The run's own names for what a model is read with now give the stand-ins."""
    decoder, tokenizer = StandInDecoder(), StandInTokenizer()
    stand_ins = {
        "resolve_model": lambda name, *, base_folder, say: ModelSource("huggingface", base_folder, name),
        "model_fingerprint": lambda source: "stand-in",
        "read_config": lambda source: decoder.config,
        "load_tokenizer": lambda source: tokenizer,
        "load_decoder": lambda source, *, dtype, device, kernels, int8_parts: decoder,
    }
    for name, stand_in in stand_ins.items():
        modules = [module for module in (run_module, engine_module) if hasattr(module, name)]
        assert modules, f"neither {run_module.__name__} nor {engine_module.__name__} has {name} any more"
        for module in modules:
            setattr(module, name, stand_in)


def measure(folder: Path) -> dict[str, object]:
    put_stand_ins()
    watch = MemoryWatch()
    stages: list[tuple[float, str]] = []
    started_at = time.monotonic()

    def note(line: str) -> None:
        stages.append((time.monotonic() - started_at, line))
        print(f"{stages[-1][0]:7.1f} s  {line}", file=sys.stderr)

    before = watch.samples
    watch.start()
    summary = run_module.run_job(load_job(folder / "job.yaml"), observer=run_module.Observer(note=note))
    watch.stop()
    peak = max(size for _, size in before)
    return {
        "benchmark": "memory",
        "rows": summary.num_rows,
        "rows_completed": summary.rows_completed,
        "prompt_tokens": summary.prompt_tokens,
        "seconds": round(summary.wall_s, 1),
        "seconds_until_planned": round(stages[-1][0], 1) if stages else None,
        "first_mb": before[0][1] // 1_000_000,
        "peak_mb": peak // 1_000_000,
        "quarters_mb": [size // 1_000_000 for size in watch.quarters()],
        "target_mb": TARGET_BYTES // 1_000_000,
        "ok": peak < TARGET_BYTES and summary.rows_completed == summary.num_rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--kilobytes", type=int, default=8)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make is not None:
        make_rows(options.make, num_rows=options.rows, num_bytes=options.kilobytes * 1000)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = ["--rows", str(options.rows), "--kilobytes", str(options.kilobytes)]
        # In a process of its own, so that making the rows leaves nothing in the one that is measured.
        subprocess.run([sys.executable, __file__, *sizes, "--make", str(folder / "rows.parquet")], check=True)
        (folder / "job.yaml").write_text(JOB)
        print(json.dumps(measure(folder)))


if __name__ == "__main__":
    main()
