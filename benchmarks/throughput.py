"""Output tokens a second on the embedded model, and whether a shared prefix is computed once.

    python benchmarks/throughput.py [--dtype bf16] [--weights auto] [--prompts 128] [--tokens 128]

Two batches through the engine, the model loaded once. `distinct`: prompts of 128 tokens that share nothing, 128 new tokens each; the
floor on two cores with AMX is 250 output tok/s. `shared`: a prefix of 512 tokens and a short end of its own for each of 256 prompts: the
tokens that were computed must be no more than those that are distinct. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchllm.engine.decoder import kv_shape
from batchllm.engine.engine import Engine
from batchllm.engine.roofline import run_roofline
from batchllm.engine.sizing import size_engine
from batchllm.models.decoder import Decoder, dtype_for, int8_parts_for
from batchllm.models.loading import load_decoder
from batchllm.models.registry import resolve_model
from batchllm.models.tokenizer import Tokenizer, load_tokenizer
from batchllm.ops import select_kernels
from batchllm.planner.plan import make_plan
from batchllm.planner.store import PromptStore
from batchllm.planner.work import plan_work
from batchllm.prompt import Completion, SamplingParams

FLOOR_TOKENS_PER_S = 250
PREFIX_TOKENS, NUM_SHARING, OWN_TOKENS, SHARED_NEW_TOKENS = 512, 256, 16, 16


def run_batch(
    prompts: np.ndarray, *, max_tokens: int, decoder: Decoder, tokenizer: Tokenizer, folder: Path
) -> dict[str, Any]:
    """Runs int32 `[prompts, tokens]` to exactly `max_tokens` new tokens each; seconds are the engine's, from the first step to the last."""
    store = PromptStore(folder)
    number = store.intern_sampling(SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    store.append_batch(
        row_index=np.arange(len(prompts)),
        lengths=np.full(len(prompts), prompts.shape[1], dtype=np.int32),
        tokens=prompts.reshape(-1),
        sampling_ids=np.full(len(prompts), number, dtype=np.int32),
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
        max_sequences="auto",
        kv_bytes="auto",
    )
    started_at = time.monotonic()
    engine = Engine(
        decoder=decoder, vocabulary=tokenizer, store=store, plan=plan, config=config, seed=0, started_at=started_at
    )
    answers: list[Completion] = []
    engine.run(deliver=answers.extend)
    seconds = time.monotonic() - started_at
    store.close()
    assert len(answers) == len(prompts) and not any(answer.error for answer in answers)
    metrics = engine.metrics
    work = plan_work(plan, generated_tokens=engine.records.generated_tokens, max_sequences=config.max_sequences)
    reached = run_roofline(work, decoder=decoder, metrics=metrics, max_step_tokens=config.max_step_tokens)
    return {
        "prompts": len(prompts),
        "seconds": round(seconds, 2),
        "output_tokens": metrics.completion_tokens,
        "output_tokens_per_s": round(metrics.completion_tokens / seconds, 1),
        "distinct_prompt_tokens": plan.unique_prompt_tokens,
        "computed_prompt_tokens": metrics.computed_prompt_tokens,
        "cached_prompt_tokens": metrics.cached_prompt_tokens,
        "model_share": round(metrics.model_s / seconds, 3),
        "steps": metrics.num_steps,
        "roofline": None if reached is None else asdict(reached),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--weights", default="auto", choices=["auto", "int8"])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="of each prompt, and as many new ones")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = resolve_model(options.model, base_folder=Path.cwd())
    tokenizer = load_tokenizer(source)
    decoder = load_decoder(
        source,
        dtype=dtype_for(options.dtype, device),
        device=device,
        kernels=select_kernels(device),
        int8_parts=int8_parts_for(options.weights),
    )
    random = np.random.default_rng(0)
    vocabulary = decoder.config.vocab_size
    distinct = random.integers(100, vocabulary, size=(options.prompts, options.tokens), dtype=np.int32)
    # The first tokens differ for sure, so that nothing is shared.
    distinct[:, 0] = 100 + np.arange(options.prompts)
    prefix = random.integers(100, vocabulary, size=PREFIX_TOKENS, dtype=np.int32)
    own = random.integers(100, vocabulary, size=(NUM_SHARING, OWN_TOKENS), dtype=np.int32)
    own[:, 0] = 100 + np.arange(NUM_SHARING)
    shared = np.concatenate([np.broadcast_to(prefix, (NUM_SHARING, PREFIX_TOKENS)), own], axis=1)
    with tempfile.TemporaryDirectory() as name:
        results = {
            key: run_batch(
                np.ascontiguousarray(prompts),
                max_tokens=max_tokens,
                decoder=decoder,
                tokenizer=tokenizer,
                folder=Path(name) / key,
            )
            for key, prompts, max_tokens in (
                ("distinct", distinct, options.tokens),
                ("shared", shared, SHARED_NEW_TOKENS),
            )
        }
    print(
        json.dumps(
            {
                "benchmark": "throughput",
                "model": options.model,
                "dtype": str(decoder.dtype).removeprefix("torch."),
                "weights": options.weights,
                "kernels": decoder.kernels.name,
                "threads": torch.get_num_threads(),
                "floor_tokens_per_s": FLOOR_TOKENS_PER_S,
                **results,
                "computed_once": results["shared"]["computed_prompt_tokens"]
                == results["shared"]["distinct_prompt_tokens"]
                == PREFIX_TOKENS + NUM_SHARING * OWN_TOKENS,
            }
        )
    )


if __name__ == "__main__":
    main()
