"""llama.cpp as a measured engine: continuous batching over its batched API, as its server does it. See `protocol.py`.

Each slot is a sequence that keeps its cache when its request ends; a new request takes the free slot whose cache begins most like it
and computes the rest (`cache_prompt` of the server). With `unified`, where sequences share one buffer of cells, the beginning is taken
from any slot, a busy one too, without copying.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from protocol import Outcome, Prompts, RunWorkload, serve


@dataclass(frozen=True, slots=True)
class Settings:
    """`weights`: bf16 or q8_0. `slots`: sequences at once, each with room for the workload's longest row.

    `repack`: quantised weights in the layout of its AMX kernels, which crashed with Q8_0 of this model in the version that is pinned.
    """

    weights: str = "bf16"
    slots: int = 32
    batch_tokens: int = 2048
    ubatch_tokens: int = 512
    unified: bool = False
    flash_attention: bool = True
    order: str = "input"
    repack: bool = False


@dataclass(slots=True)
class _Slot:
    """A sequence: `cached` are the tokens whose keys and values it holds; `row` is -1 while it is free."""

    sequence: int
    row: int = -1
    cached: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    prompt: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    num_done: int = 0
    next_token: int = -1


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


def load(settings: Settings, model: Path) -> RunWorkload:
    import llama_cpp

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = settings.repack
    file = model / f"model-{settings.weights}.gguf"
    weights = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))

    def run_workload(prompts: Prompts) -> Outcome:
        longest = max(len(ids) + count for ids, count in zip(prompts.token_ids, prompts.max_tokens, strict=True))
        num_slots = min(settings.slots, len(prompts.token_ids))
        # Its cache is sized for the workload here; the others allocate theirs when they load, which is not timed either.
        context = _context(llama_cpp, weights, settings, num_slots=num_slots, longest=longest)
        started_at = time.monotonic()
        try:
            outputs, first_s = _run(llama_cpp, context, prompts, settings, num_slots=num_slots, vocabulary=vocabulary)
            seconds = time.monotonic() - started_at
        finally:
            llama_cpp.llama_free(context)
        return Outcome(
            seconds=seconds,
            outputs=outputs,
            first_token_s=first_s - started_at,
            details={"system": llama_cpp.llama_print_system_info().decode()},
        )

    run_workload(Prompts(name="warm-up", path=Path(), token_ids=[[100, 200, 300]], max_tokens=[4]))
    return run_workload


def _context(llama_cpp, weights, settings: Settings, *, num_slots: int, longest: int):
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = (longest + 32) // 32 * 32 * num_slots
    params.n_batch = settings.batch_tokens
    params.n_ubatch = settings.ubatch_tokens
    params.n_seq_max = num_slots
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    params.kv_unified = settings.unified
    params.flash_attn_type = int(settings.flash_attention)
    params.no_perf = True
    context = llama_cpp.llama_init_from_model(weights, params)
    if not context:
        raise RuntimeError("llama.cpp made no context")
    return context


def _run(llama_cpp, context, prompts: Prompts, settings: Settings, *, num_slots: int, vocabulary: int):
    """Outputs per row, and when the first token came."""
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(settings.batch_tokens, 0, 1)
    order = list(range(len(prompts.token_ids)))
    if settings.order == "sorted":
        order.sort(key=prompts.token_ids.__getitem__)
    waiting = [(row, np.array(prompts.token_ids[row], dtype=np.int32)) for row in reversed(order)]
    slots = [_Slot(sequence) for sequence in range(num_slots)]
    outputs: list[list[int]] = [[] for _ in order]
    num_left, first_at = len(order), 0.0
    while num_left:
        for _ in range(sum(slot.row < 0 for slot in slots)):
            if not waiting:
                break
            row, prompt = waiting.pop()
            _admit(llama_cpp, memory, slots, row=row, prompt=prompt, unified=settings.unified)
        asked = _fill(batch, slots, room=settings.batch_tokens)
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed: the cache has no room")
        logits = np.ctypeslib.as_array(
            ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float)), (len(asked), vocabulary)
        )
        for slot, token in zip(asked, logits.argmax(axis=1).tolist(), strict=True):
            outputs[slot.row].append(token)
            slot.next_token = token
            if len(outputs[slot.row]) == prompts.max_tokens[slot.row]:
                slot.row = -1
                num_left -= 1
        if asked and not first_at:
            first_at = time.monotonic()
    llama_cpp.llama_batch_free(batch)
    return outputs, first_at


def _admit(llama_cpp, memory, slots: list[_Slot], *, row: int, prompt: np.ndarray, unified: bool) -> None:
    """Gives `row` the free slot that fits best; its last prompt token is always computed, for the logits."""
    usable = prompt[:-1]
    free = [slot for slot in slots if slot.row < 0]
    slot = max(free, key=lambda slot: common_length(slot.cached, usable))
    num_kept = common_length(slot.cached, usable)
    if unified:
        other = max(slots, key=lambda slot: common_length(slot.cached, usable))
        if (length := common_length(other.cached, usable)) > num_kept:
            llama_cpp.llama_memory_seq_rm(memory, slot.sequence, -1, -1)
            llama_cpp.llama_memory_seq_cp(memory, other.sequence, slot.sequence, 0, length)
            num_kept = length
    llama_cpp.llama_memory_seq_rm(memory, slot.sequence, num_kept, -1)
    slot.row, slot.prompt, slot.num_done, slot.next_token = row, prompt, num_kept, -1
    slot.cached = prompt[:num_kept]


def _fill(batch, slots: list[_Slot], *, room: int) -> list[_Slot]:
    """Fills the batch: a token of each decoding slot, then prompts as far as there is room. Returns the slots that get a token, in order."""
    asked: list[_Slot] = []
    place = 0

    def put(slot: _Slot, tokens: np.ndarray, *, wants_last: bool) -> None:
        nonlocal place
        position = len(slot.cached)
        for offset, token in enumerate(tokens.tolist()):
            batch.token[place] = token
            batch.pos[place] = position + offset
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = slot.sequence
            batch.logits[place] = wants_last and offset == len(tokens) - 1
            place += 1
        slot.cached = np.concatenate([slot.cached, tokens])
        if wants_last:
            asked.append(slot)

    for slot in slots:
        if slot.row >= 0 and slot.next_token >= 0:
            put(slot, np.array([slot.next_token], dtype=np.int32), wants_last=True)
    for slot in slots:
        if slot.row >= 0 and slot.next_token < 0 and place < room:
            chunk = slot.prompt[slot.num_done : slot.num_done + room - place]
            slot.num_done += len(chunk)
            put(slot, chunk, wants_last=slot.num_done == len(slot.prompt))
    batch.n_tokens = place
    return asked


if __name__ == "__main__":
    serve("llamacpp", Settings, load)
