"""transformers as a measured engine: `generate` in sorted batches, or its continuous batching. See `protocol.py`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol import Outcome, Prompts, RunWorkload, serve


@dataclass(frozen=True, slots=True)
class Settings:
    """`mode`: `generate` or `continuous` (what `generate_batch` runs on). `batch`: rows of a `generate` call, sorted by the tokens wanted.

    `memory_share`: of free memory, for the KV cache of `continuous`.
    """

    mode: str = "generate"
    batch: int = 64
    attention: str = "sdpa"
    memory_share: float = 0.3


def load(settings: Settings, model: Path) -> RunWorkload:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM

    decoder = AutoModelForCausalLM.from_pretrained(
        model / "huggingface", dtype=torch.bfloat16, attn_implementation=settings.attention
    ).eval()
    pad_id = decoder.config.eos_token_id

    def generate(prompts: Prompts) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts.token_ids]
        # A batch runs as long as its longest row and is padded to its longest prompt.
        order = sorted(range(len(outputs)), key=lambda row: (prompts.max_tokens[row], len(prompts.token_ids[row])))
        for start in range(0, len(order), settings.batch):
            rows = order[start : start + settings.batch]
            width = max(len(prompts.token_ids[row]) for row in rows)
            ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for place, row in enumerate(rows):
                ids[place, width - len(prompts.token_ids[row]) :] = torch.tensor(prompts.token_ids[row])
                mask[place, width - len(prompts.token_ids[row]) :] = 1
            most = max(prompts.max_tokens[row] for row in rows)
            with torch.inference_mode():
                out = decoder.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=most,
                    min_new_tokens=most,
                    do_sample=False,
                    pad_token_id=pad_id,
                )
            for place, row in enumerate(rows):
                outputs[row] = out[place, width : width + prompts.max_tokens[row]].tolist()
        return outputs

    manager = _manager(decoder, settings) if settings.mode == "continuous" else None

    def generate_continuously(prompts: Prompts) -> list[list[int]]:
        assert manager is not None
        outputs: list[list[int]] = [[] for _ in prompts.token_ids]
        rows = {}
        # Neighbours with one prefix find its blocks; `generate_batch` sorts for the same reason.
        for row in sorted(range(len(outputs)), key=prompts.token_ids.__getitem__):
            name = manager.add_request(prompts.token_ids[row], max_new_tokens=prompts.max_tokens[row], eos_token_id=-1)
            rows[name] = row
        while rows:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the generation thread ended")
            if result is not None and result.is_finished():
                outputs[rows.pop(result.request_id)] = list(result.generated_tokens)
        return outputs

    def run_workload(prompts: Prompts) -> Outcome:
        started_at = time.monotonic()
        outputs = generate_continuously(prompts) if settings.mode == "continuous" else generate(prompts)
        return Outcome(seconds=time.monotonic() - started_at, outputs=outputs)

    run_workload(Prompts(name="warm-up", path=Path(), token_ids=[[100, 200, 300]], max_tokens=[4]))
    return run_workload


def _manager(decoder: Any, settings: Settings) -> Any:
    """What `generate_batch` runs on, kept from one workload to the next, with a length for each request."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    manager = decoder.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=512, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            max_memory_percent=settings.memory_share, use_cuda_graph=False
        ),
    )
    manager.start()
    return manager


if __name__ == "__main__":
    serve("transformers", Settings, load)
