"""transformers as a measured engine: `generate` in sorted batches, or `generate_batch`. See `protocol.py`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from protocol import Outcome, Prompts, RunWorkload, serve


@dataclass(frozen=True, slots=True)
class Settings:
    """`mode`: `generate` or `continuous` (generate_batch). `batch`: rows of a `generate` call, sorted by the tokens wanted."""

    mode: str = "generate"
    batch: int = 64
    attention: str = "sdpa"


def load(settings: Settings, model: Path) -> RunWorkload:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

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

    def generate_continuously(prompts: Prompts) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts.token_ids]
        # The call takes one length for all its prompts.
        for count in sorted(set(prompts.max_tokens)):
            rows = [row for row, wanted in enumerate(prompts.max_tokens) if wanted == count]
            config = GenerationConfig(
                max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=pad_id, use_cuda_graph=False
            )
            results = decoder.generate_batch(
                inputs=[prompts.token_ids[row] for row in rows], generation_config=config, progress_bar=False
            )
            for row, request in zip(rows, sorted(results, key=lambda name: int(name.rsplit("_", 1)[-1])), strict=True):
                outputs[row] = list(results[request].generated_tokens)
        return outputs

    def run_workload(prompts: Prompts) -> Outcome:
        started_at = time.monotonic()
        outputs = generate_continuously(prompts) if settings.mode == "continuous" else generate(prompts)
        return Outcome(seconds=time.monotonic() - started_at, outputs=outputs)

    run_workload(Prompts(name="warm-up", path=Path(), token_ids=[[100, 200, 300]], max_tokens=[4]))
    return run_workload


if __name__ == "__main__":
    serve("transformers", Settings, load)
