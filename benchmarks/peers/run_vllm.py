"""vLLM's CPU build as a measured engine, in one process, prefix caching on. See `protocol.py`.

Prompts go in as token ids and ids come out: nothing is tokenised or detokenised.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from protocol import Outcome, Prompts, RunWorkload, serve


@dataclass(frozen=True, slots=True)
class Settings:
    """`cores` as vLLM's thread binding wants them, empty for all; `pool_gib` is its KV pool, which is resident from the start."""

    dtype: str = "bfloat16"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    pool_gib: int = 8
    cores: str = ""
    enforce_eager: bool = False
    prefix_caching: bool = True
    block_size: int = 0


def load(settings: Settings, model: Path) -> RunWorkload:
    # vLLM reads these when it is imported.
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.pool_gib)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = settings.cores or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    sizes = {"block_size": settings.block_size} if settings.block_size else {}
    engine = LLM(
        model=str(model / "huggingface"),
        dtype=settings.dtype,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=8192,
        enforce_eager=settings.enforce_eager,
        enable_prefix_caching=settings.prefix_caching,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **sizes,
    )

    def generate(token_ids: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in max_tokens
        ]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
        return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params, use_tqdm=False)]

    generate([[100, 200, 300]], [4])

    def run_workload(prompts: Prompts) -> Outcome:
        engine.reset_prefix_cache()
        started_at = time.monotonic()
        outputs = generate(prompts.token_ids, prompts.max_tokens)
        return Outcome(seconds=time.monotonic() - started_at, outputs=outputs)

    return run_workload


if __name__ == "__main__":
    serve("vllm", Settings, load)
