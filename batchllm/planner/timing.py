"""At which step each prompt of a plan runs: admission in plan order, simulated."""

from __future__ import annotations

import heapq

import numpy as np


def run_in_order(
    *, computed_tokens: np.ndarray, decode_tokens: np.ndarray, max_sequences: int, step_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step at which the prompt at each plan position is admitted, prefilled and finished, float64 `[N]` each.

    Int `[N]` by plan position: prompt tokens that are computed, and tokens that are generated, one a step. `max_sequences` run at once and as
    many as fit. A step computes `step_tokens` tokens: one for each running sequence, prompt tokens with the rest, prompt after prompt. One pass
    with a heap, O(N log N).
    """
    prefill_steps = computed_tokens / max(step_tokens - max_sequences, step_tokens // 2, 1)
    free_at = [0.0] * max_sequences
    prefill_clock = 0.0
    admitted: list[float] = []
    prefilled: list[float] = []
    for prefill, generate in zip(prefill_steps.tolist(), decode_tokens.tolist(), strict=True):
        at = max(free_at[0], prefill_clock)
        prefill_clock = at + prefill
        heapq.heapreplace(free_at, prefill_clock + generate)
        admitted.append(at)
        prefilled.append(prefill_clock)
    ready = np.array(prefilled)
    return np.array(admitted), ready, ready + decode_tokens
