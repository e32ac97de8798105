"""How large an engine to build: what a job leaves to `auto` is chosen from the device, the model and the plan."""

from __future__ import annotations

import os
from typing import Literal

import numpy as np
import torch

from batchllm.engine.blocks import num_blocks_for
from batchllm.engine.engine import EngineConfig
from batchllm.engine.pool import KvShape
from batchllm.engine.scheduler import Speculation
from batchllm.errors import JobError
from batchllm.planner.drain import EngineWidth, Width
from batchllm.planner.plan import Plan

Auto = Literal["auto"]

CPU_SEQUENCES, GPU_SEQUENCES = 256, 1024
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 2048, 8192
_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.85}
"""Of the memory that is free when the model is loaded, what the pool may take. A CPU's memory is shared with the system's file cache."""

_BUSY_SHARE = 16
"""An engine that runs a sixteenth of its usual sequences is busy: on a CPU these rows fill the tiles of a product."""


def engine_width(device: torch.device, *, max_step_tokens: int | Auto, max_sequences: int | Auto) -> EngineWidth:
    """How wide such an engine is, for `make_plan`. A number of sequences that the job names stays as it is."""
    usual_sequences, usual_tokens = _usual_sizes(device)
    most = usual_sequences if max_sequences == "auto" else max_sequences
    return EngineWidth(
        Width(most=most, fewest=most // _BUSY_SHARE if max_sequences == "auto" else most),
        step_tokens=max(usual_tokens, most) if max_step_tokens == "auto" else max_step_tokens,
    )


def size_engine(
    *,
    plan: Plan,
    shape: KvShape,
    device: torch.device,
    max_context: int,
    block_size: int,
    max_step_tokens: int | Auto,
    max_sequences: int | Auto,
    kv_bytes: int | Auto,
    evict_least_recent: bool = False,
    speculation: Speculation = "off",
) -> EngineConfig:
    """The sizes to run `plan` with. Raises JobError when the KV memory that the job names holds no block, or drafts are wanted on a GPU.

    There steps are launched before the tokens that a draft would continue are known: `auto` drafts nothing.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and isinstance(speculation, int):
        raise JobError(
            f"engine.speculation: {speculation} drafted tokens are not supported on cuda, where a step is launched before the "
            "tokens of the one before are known; leave it at auto, or say off"
        )
    usual_sequences, usual_tokens = _usual_sizes(device)
    if max_sequences == "auto":
        max_sequences = usual_sequences if plan.width is None else plan.width.most
    sequences = max(1, min(max_sequences, plan.num_prompts))
    step_tokens = max(usual_tokens, sequences) if max_step_tokens == "auto" else max_step_tokens
    block_bytes = shape.block_bytes(block_size)
    if kv_bytes == "auto":
        available = int(_available_bytes(device) * _MEMORY_SHARE[device.type])
        num_blocks = max(1, min(available // block_bytes, _widest_blocks(plan, sequences, max_context, block_size)))
    else:
        num_blocks = kv_bytes // block_bytes
        if num_blocks == 0:
            raise JobError(f"engine.kv.device: {kv_bytes} bytes hold no block of {block_bytes} bytes; give more")
    return EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_step_tokens=step_tokens,
        max_sequences=sequences,
        evict_least_recent=evict_least_recent,
        speculation="off" if on_gpu else speculation,
        runs_ahead=on_gpu,
    )


def _usual_sizes(device: torch.device) -> tuple[int, int]:
    """Sequences at once and rows of a step."""
    return (GPU_SEQUENCES, GPU_STEP_TOKENS) if device.type == "cuda" else (CPU_SEQUENCES, CPU_STEP_TOKENS)


def _widest_blocks(plan: Plan, max_sequences: int, max_context: int, block_size: int) -> int:
    """Blocks past which a pool stays empty: the widest run of neighbours in the plan, each with its whole completion.

    What neighbours share counts once. Two blocks a sequence are added for those that are partly filled or kept for copying.
    """
    lengths = np.minimum(plan.prompt_tokens.astype(np.int64) + plan.decode_tokens, max_context)
    width = min(max_sequences, lengths.size)
    widest = _widest_window(lengths - plan.shared_tokens, width)
    if not np.array_equal(plan.tree_position, np.arange(plan.num_prompts)):
        # What a row shares is counted with another one, which may be far off: at most all that is shared is there beside them, and at most
        # all of each.
        num_shared = int((plan.tree.end.astype(np.int64) - plan.tree.start).sum())
        widest = min(widest + num_shared, _widest_window(lengths, width))
    return num_blocks_for(widest + int(lengths.max(initial=1)), block_size) + 2 * width + 1


def _widest_window(lengths: np.ndarray, width: int) -> int:
    """The largest sum of `width` neighbours."""
    sums = np.concatenate([[0], np.cumsum(lengths)])
    return int((sums[width:] - sums[:-width]).max(initial=0)) if width else 0


def least_tokens(plan: Plan, config: EngineConfig, *, lengths_are_certain: bool) -> int:
    """Tokens whose keys and values a pool with room for them comes to hold at once, in all likelihood.

    All prompts', and if no row ends before the last one begins, half of as many more as the shortest completion has: the rows that
    began last have only some when the first ones end, and drafts let some end early.
    """
    prompts = plan.unique_prompt_tokens
    shortest = int(plan.decode_tokens.min()) if plan.num_prompts else 0
    at_once = plan.num_prompts <= config.max_sequences and prompts <= shortest * config.max_step_tokens
    return prompts + (plan.num_prompts * shortest // 2 if at_once and lengths_are_certain else 0)


def most_blocks(plan: Plan, *, max_context: int, block_size: int) -> int:
    """Blocks that the whole batch would fill if none were ever given back."""
    own = plan.prompt_tokens.astype(np.int64) - plan.shared_tokens
    completions = np.minimum(plan.prompt_tokens + plan.decode_tokens, max_context) - plan.prompt_tokens
    return int((-(-(own + completions) // block_size) + 1).sum())


def available_memory_bytes() -> int:
    """Memory that the system could give without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _available_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()
