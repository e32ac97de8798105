"""batchllm as a measured engine: the whole of `batchllm run` on a workload, through the public Python API.

A run is timed from the job to the closed Parquet parts: reading and checking the input, loading the tokenizer, tokenising the text,
planning, all steps, detokenising, writing. Only loading the weights is taken out, as every engine's load is; `details` has both. What comes
behind the last completion is not a part of it: measuring the machine for the report, once a process, and the record of the run.
See `protocol.py`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from protocol import Outcome, Prompts, RunWorkload, serve

from batchllm import Job, run
from batchllm.run_summary import summary_values

MODEL = "smollm2-135m"
_KEPT = (
    "wall_s load_s num_steps prompt_tokens unique_prompt_tokens computed_prompt_tokens completion_tokens "
    "output_tokens_per_s kernels dtype kv_peak_share"
).split()


@dataclass(frozen=True, slots=True)
class Settings:
    """`weights`: empty for the model's own, `int8` for quantised ones."""

    dtype: str = "bf16"
    weights: str = ""


def load(settings: Settings, model: Path) -> RunWorkload:
    """The exported model is not read: the embedded one is the same, and is what a user runs."""
    engine = {"dtype": settings.dtype} | ({"weights": settings.weights} if settings.weights else {})

    def run_rows(rows: pa.Table | Path, *, limit: int | None) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="batchllm-compare-") as name:
            job = Job(
                model=MODEL,
                prompt={"raw": True, "template": "{{ text }}"},
                sampling={"max_tokens": {"column": "max_tokens"}, "temperature": 0, "ignore_eos": True},
                output={"path": str(Path(name) / "out"), "token_ids": True},
                engine=engine,
            )
            result = run(job, rows, limit=limit)
            table = result.to_table().sort_by("row_index")
        if table.column("error").null_count != table.num_rows:
            raise RuntimeError(f"rows failed: {table.column('error').drop_null()[0]}")
        summary = summary_values(result.summary)
        if summary["kernels"] == "reference":
            raise RuntimeError("the reference kernels ran, many times slower than others: `batchllm doctor` says why")
        load_s = result.summary.load_s
        # Both count from the start of the job, the load included.
        first_token_s = pc.min(pc.add(table.column("queue_s"), table.column("ttft_s"))).as_py()
        return Outcome(
            seconds=result.summary.wall_s - load_s,
            outputs=table.column("token_ids").to_pylist(),
            first_token_s=first_token_s - load_s,
            details={key: summary[key] for key in _KEPT},
        )

    run_rows(pa.table({"text": ["One short row before the first measured one."], "max_tokens": [4]}), limit=None)

    def run_workload(prompts: Prompts) -> Outcome:
        outcome = run_rows(prompts.path, limit=prompts.limit)
        num_tokens = sum(len(ids) for ids in prompts.token_ids)
        if outcome.details["prompt_tokens"] != num_tokens:
            raise RuntimeError(f"the text gave {outcome.details['prompt_tokens']} prompt tokens, not {num_tokens}")
        return outcome

    return run_workload


if __name__ == "__main__":
    serve("batchllm", Settings, load)
