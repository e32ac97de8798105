"""OpenVINO GenAI's continuous batching as a measured engine. See `protocol.py`; `convert_openvino.py` makes its models.

Requests are added in a window: its prefix cache finds only blocks of prompts that were computed before a request was added, so a batch
that is added at once shares nothing. With `lead`, the first request of a batch runs alone until its first token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from protocol import Outcome, Prompts, RunWorkload, serve


@dataclass(frozen=True, slots=True)
class Settings:
    """`weights`: bf16 or int8. `window`: requests in flight at most. `kv`: precision of the KV cache, empty for the default.

    `order`: `input` as the rows stand, `sorted` by their tokens, so that prompts with one prefix are neighbours.
    """

    weights: str = "bf16"
    precision: str = "bf16"
    kv: str = ""
    window: int = 64
    max_num_batched_tokens: int = 2048
    cache_gb: int = 8
    order: str = "input"
    lead: bool = True


def load(settings: Settings, model: Path) -> RunWorkload:
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = settings.window
    scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
    scheduler.cache_size = settings.cache_gb
    scheduler.dynamic_split_fuse = True
    # No number of threads: set to any, the plugin ends with a division by zero on a machine of two cores without siblings.
    properties = {"INFERENCE_PRECISION_HINT": settings.precision}
    if settings.kv:
        properties["KV_CACHE_PRECISION"] = settings.kv
    folder = model / f"openvino-{settings.weights}"
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def run_workload(prompts: Prompts) -> Outcome:
        order = list(range(len(prompts.token_ids)))
        if settings.order == "sorted":
            order.sort(key=prompts.token_ids.__getitem__)
        outputs: list[list[int]] = [[] for _ in order]
        in_flight: dict[int, object] = {}
        started_at = time.monotonic()
        first_token_s = None
        waiting = iter(order)
        num_left = len(order)
        while num_left:
            room = 1 if settings.lead and first_token_s is None else settings.window
            while len(in_flight) < room and (row := next(waiting, None)) is not None:
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens = prompts.max_tokens[row]
                config.ignore_eos = True
                config.do_sample = False
                ids = openvino.Tensor(np.array([prompts.token_ids[row]], dtype=np.int64))
                in_flight[row] = pipeline.add_request(row, ids, config)
            pipeline.step()
            for row, handle in list(in_flight.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        outputs[row] += output.generated_ids
                        first_token_s = first_token_s or time.monotonic() - started_at
                if len(outputs[row]) >= prompts.max_tokens[row]:
                    del in_flight[row]
                    num_left -= 1
        return Outcome(seconds=time.monotonic() - started_at, outputs=outputs, first_token_s=first_token_s)

    run_workload(Prompts(name="warm-up", path=Path(), token_ids=[[100, 200, 300]], max_tokens=[4]))
    return run_workload


if __name__ == "__main__":
    serve("openvino", Settings, load)
