"""Plans a synthetic batch of a million prompts of 500 tokens: seconds by phase and peak memory.

    python benchmarks/plan_scale.py [--num-prompts 1000000] [--num-tokens 500]

The batch is three levels deep and shuffled: one system prompt of 100 tokens, a document of 250 tokens for every 100
prompts, a question of 50 tokens out of 5,000, then tokens of its own; lengths vary by half, one prompt in twenty is a
duplicate. Each phase's seconds and the peak resident memory so far are printed; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from batchllm.planner.explain import EngineLimits, ModelFacts, explain
from batchllm.planner.order import blend_order
from batchllm.planner.plan import make_plan, most_decode_tokens
from batchllm.planner.sort import sort_sequences
from batchllm.planner.store import PromptStore
from batchllm.planner.tree import build_tree, shared_with_previous
from batchllm.prompt import SamplingParams

VOCABULARY = 49152
ROWS_AT_ONCE = 4096
SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS = 100, 250, 50
PROMPTS_PER_DOCUMENT, NUM_QUESTIONS = 100, 5000
MAX_TOKENS = (32, 64, 256)


def write_prompts(folder: Path, *, num_prompts: int, num_tokens: int) -> PromptStore:
    random = np.random.default_rng(0)
    num_documents = max(1, num_prompts // PROMPTS_PER_DOCUMENT)
    system = random.integers(0, VOCABULARY, size=SYSTEM_TOKENS, dtype=np.int32)
    documents = random.integers(0, VOCABULARY, size=(num_documents, DOCUMENT_TOKENS), dtype=np.int32)
    questions = random.integers(0, VOCABULARY, size=(NUM_QUESTIONS, QUESTION_TOKENS), dtype=np.int32)
    store = PromptStore(folder)
    for limit in MAX_TOKENS:
        store.intern_sampling(SamplingParams(max_tokens=limit))
    for begin in range(0, num_prompts, ROWS_AT_ONCE):
        num_rows = min(ROWS_AT_ONCE, num_prompts - begin)
        rows = random.integers(0, VOCABULARY, size=(num_rows, num_tokens * 3 // 2), dtype=np.int32)
        heads = np.concatenate(
            (
                np.broadcast_to(system, (num_rows, SYSTEM_TOKENS)),
                documents[random.integers(0, num_documents, size=num_rows)],
                questions[random.integers(0, NUM_QUESTIONS, size=num_rows)],
            ),
            axis=1,
        )[:, : rows.shape[1]]
        rows[:, : heads.shape[1]] = heads
        lengths = random.integers(num_tokens // 2, num_tokens * 3 // 2 + 1, size=num_rows, dtype=np.int32)
        copies = np.arange(20, num_rows, 20)
        rows[copies] = rows[copies - 13]
        lengths[copies] = lengths[copies - 13]
        store.append_batch(
            row_index=np.arange(begin, begin + num_rows),
            lengths=lengths,
            tokens=rows[np.arange(rows.shape[1]) < lengths[:, None]],
            sampling_ids=random.integers(0, len(MAX_TOKENS), size=num_rows, dtype=np.int32),
        )
    store.finish()
    return store


def peak_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=1_000_000)
    parser.add_argument("--num-tokens", type=int, default=500)
    arguments = parser.parse_args()
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal began
        seconds[phase] = round(time.perf_counter() - began, 2)
        print(f"{phase:12} {seconds[phase]:8.2f} s   peak {peak_rss_mib():8.0f} MiB", flush=True)
        began = time.perf_counter()

    with tempfile.TemporaryDirectory() as name:
        store = write_prompts(Path(name), num_prompts=arguments.num_prompts, num_tokens=arguments.num_tokens)
        lap("write")
        tokens = sort_sequences(store.folder / "tokens.bin", offset=store.offset, length=store.length)
        lap("sort")
        tree = build_tree(tokens.lcp)
        lap("tree")
        decode = most_decode_tokens(store, max_model_tokens=None)[tokens.order]
        order, tree = blend_order(
            tree,
            prompt_tokens=store.length[tokens.order],
            decode_tokens=decode,
        )
        shared_with_previous(tree)
        lap("order")
        del tokens, tree, order, decode
        plan = make_plan(store, prefix_sharing=True)
        lap("make_plan")
        explanation = explain(
            plan,
            store,
            model=ModelFacts(num_layers=30, num_kv_heads=3, head_dim=64, kv_dtype_bytes=2, context_tokens=8192),
            limits=EngineLimits(max_sequences=256, step_tokens=2048, read_chunk=256),
            rates=None,
            decode_text=str,
        )
        lap("explain")
        store.close()
    result = {
        "num_prompts": plan.num_prompts,
        "prompt_tokens": plan.total_prompt_tokens,
        "unique_prompt_tokens": plan.unique_prompt_tokens,
        "num_nodes": plan.tree.num_nodes,
        "peak_live_tokens": explanation.peak_live_tokens,
        "seconds": seconds,
        "peak_rss_mib": round(peak_rss_mib()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
