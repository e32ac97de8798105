"""What drafts from a row's own text gain: a rewriting job that copies phrases, with drafts and without, in turn in one process.

    python benchmarks/speculation.py [--rounds 3] [--batch 4] [--full 128]

Two loads: `small`, `--batch` sequences at a time, as in the draining end of a job or with long contexts; `full`, `--full` of them at once, all of
the same length, so that nothing drains. The prompt asks for a passage of Python's documentation again with small changes, greedy. Each
round runs plain and with drafts, the order turning round by round; the ratio is of the engines' seconds in one round, the middle one of all.
Tokens must be equal. Wanted: 1.3 small, 0.98 full. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch

from batchllm.engine.decoder import kv_shape
from batchllm.engine.engine import Engine
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.scheduler import Speculation
from batchllm.engine.sizing import size_engine
from batchllm.models.decoder import Decoder, dtype_for
from batchllm.models.loading import load_decoder
from batchllm.models.registry import resolve_model
from batchllm.models.tokenizer import Tokenizer, load_tokenizer
from batchllm.ops import select_kernels
from batchllm.planner.plan import make_plan
from batchllm.planner.store import PromptStore
from batchllm.prompt import Completion, SamplingParams

PASSAGE_WORDS = 90
ASK = (
    "<|im_start|>user\nCopy the following text word for word. Only correct its typing mistakes.\n\n{text}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@dataclass(frozen=True, slots=True)
class Load:
    """`num_rows` prompts, `sequences` at a time, exactly `max_tokens` new tokens each."""

    name: str
    num_rows: int
    sequences: int
    max_tokens: int
    wanted: float


def passages() -> list[str]:
    """Passages of prose, the same on each machine with the same Python."""
    words = " ".join(topics.topics[name] for name in sorted(topics.topics)).split()
    return [" ".join(words[start : start + PASSAGE_WORDS]) for start in range(0, len(words), PASSAGE_WORDS)]


def run(
    prompts: list[np.ndarray], load: Load, *, speculation: Speculation, decoder: Decoder, tokenizer: Tokenizer
) -> tuple[dict[int, list[int]], RunMetrics, float]:
    """Token ids by row, the engine's metrics, and its seconds from the first step to the last."""
    with tempfile.TemporaryDirectory() as name:
        store = PromptStore(Path(name) / "store")
        number = store.intern_sampling(SamplingParams(max_tokens=load.max_tokens, ignore_eos=True))
        store.append_batch(
            row_index=np.arange(load.num_rows),
            lengths=np.array([prompt.size for prompt in prompts], dtype=np.int32),
            tokens=np.concatenate(prompts).astype(np.int32),
            sampling_ids=np.full(load.num_rows, number, dtype=np.int32),
        )
        store.finish()
        plan = make_plan(store, prefix_sharing=True, max_model_tokens=decoder.config.max_context)
        config = size_engine(
            plan=plan,
            shape=kv_shape(decoder),
            device=decoder.device,
            max_context=decoder.config.max_context,
            block_size=16,
            max_step_tokens="auto",
            max_sequences=load.sequences,
            kv_bytes="auto",
            speculation=speculation,
        )
        started_at = time.monotonic()
        engine = Engine(
            decoder=decoder, vocabulary=tokenizer, store=store, plan=plan, config=config, seed=0, started_at=started_at
        )
        answers: list[Completion] = []
        engine.run(deliver=answers.extend)
        seconds = time.monotonic() - started_at
        store.close()
    assert len(answers) == load.num_rows and not any(answer.error for answer in answers)
    return {answer.row_index: answer.token_ids for answer in answers}, engine.metrics, seconds


def compare(load: Load, *, rounds: int, decoder: Decoder, tokenizer: Tokenizer) -> dict[str, Any]:
    """Ratios of plain seconds over seconds with drafts, and what was drafted."""
    texts = [ASK.format(text=text) for text in passages()[: load.num_rows]]
    prompts = tokenizer.encode_batch(texts, allow_special=True)
    ratios: list[float] = []
    is_equal = True
    for number in range(rounds):
        found = {}
        for speculation in ("off", "auto") if number % 2 == 0 else ("auto", "off"):
            found[speculation] = run(prompts, load, speculation=speculation, decoder=decoder, tokenizer=tokenizer)
        (plain, plain_metrics, plain_s), (drafted, metrics, drafted_s) = found["off"], found["auto"]
        is_equal &= plain == drafted
        ratios.append(plain_s / drafted_s)
        print(
            f"{load.name} round {number + 1}: plain {plain_s:.2f} s in {plain_metrics.num_steps} steps, with drafts "
            f"{drafted_s:.2f} s in {metrics.num_steps}; {metrics.accepted_tokens} of {metrics.drafted_tokens} drafted "
            f"tokens right; ratio {ratios[-1]:.3f}",
            flush=True,
        )
    return {
        "rows": load.num_rows,
        "sequences": load.sequences,
        "tokens_each": load.max_tokens,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "wanted": load.wanted,
        "tokens_equal": is_equal,
        "plain_steps": plain_metrics.num_steps,
        "steps": metrics.num_steps,
        "drafted_tokens": metrics.drafted_tokens,
        "accepted_tokens": metrics.accepted_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--full", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", choices=["small", "full"])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = resolve_model(options.model, base_folder=Path.cwd())
    decoder = load_decoder(
        source, dtype=dtype_for(options.dtype, device), device=device, kernels=select_kernels(device)
    )
    tokenizer = load_tokenizer(source)
    loads = [
        Load("small", 3 * options.batch, options.batch, options.tokens, wanted=1.3),
        Load("full", options.full, options.full, options.tokens, wanted=0.98),
    ]
    results = {
        load.name: compare(load, rounds=options.rounds, decoder=decoder, tokenizer=tokenizer)
        for load in loads
        if options.only in (None, load.name)
    }
    print(
        json.dumps(
            {
                "benchmark": "speculation",
                "model": options.model,
                "dtype": str(decoder.dtype).removeprefix("torch."),
                "kernels": decoder.kernels.name,
                "threads": torch.get_num_threads(),
                **results,
            }
        )
    )


if __name__ == "__main__":
    main()
