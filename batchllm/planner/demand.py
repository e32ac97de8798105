"""What running the plan will hold at each moment: a cheap simulation of admission in plan order."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from batchllm.planner.intervals import interval_max
from batchllm.planner.plan import Plan
from batchllm.planner.tree import own_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """How a plan's load goes up and down, in decode steps, as stretches between the moments at which it changes.

    Per stretch, float64 `[E]`: `duration` in steps, `running`, the sequences that decode, and `live_tokens`, the mean
    number of tokens whose keys and values are held, a shared run once. `peak_live_tokens` is the greatest at any moment
    and `num_steps` the whole length.
    """

    duration: np.ndarray
    running: np.ndarray
    live_tokens: np.ndarray
    peak_live_tokens: int
    num_steps: float

    @property
    def tail_share(self) -> float:
        """Share of the steps after the moment from which fewer than a quarter of the most sequences run."""
        if not len(self.running):
            return 0.0
        after_last_wide = np.flatnonzero(self.running >= self.running.max() / 4)[-1] + 1
        return float(self.duration[after_last_wide:].sum() / self.num_steps)


def simulate_demand(plan: Plan, *, max_sequences: int, step_tokens: int) -> Demand:
    """Admits sequences in plan order, `max_sequences` at a time and as many as fit; each generates all it may.

    A step computes `step_tokens` tokens: one for each running sequence, prompt tokens with the rest. Memory is taken as
    unlimited, so the peak is what the plan asks for. One pass with a heap, O(N log N).
    """
    if plan.num_prompts == 0:
        nothing = np.zeros(0)
        return Demand(duration=nothing, running=nothing, live_tokens=nothing, peak_live_tokens=0, num_steps=0.0)
    prefill_tokens_per_step = max(step_tokens - max_sequences, step_tokens // 2, 1)
    prefill_steps = plan.computed_tokens / prefill_tokens_per_step
    admitted, prefilled, finished = _run_in_order(plan, prefill_steps=prefill_steps, max_sequences=max_sequences)

    own = own_tokens(plan.tree, plan.prompt_tokens)
    span = plan.tree.end - plan.tree.start
    node_finished = interval_max(finished, first=plan.tree.first, last=plan.tree.last)
    events = (
        _Events(time=admitted, tokens=own),
        _Events(time=admitted[plan.tree.first], tokens=span),
        _Events(time=node_finished, tokens=-span),
        _Events(time=prefilled, sequences=1),
        # The difference of the times, not the count, so that what the running sequences added cancels exactly.
        _Events(time=finished, tokens=-own - (finished - prefilled), sequences=-1),
    )
    return _integrate(events)


def compact(demand: Demand) -> Demand:
    """The same load with one stretch for each number of running sequences, fewest first; predictions from it are equal."""
    running, place = np.unique(demand.running, return_inverse=True)
    duration = np.bincount(place, weights=demand.duration, minlength=len(running))
    held = np.bincount(place, weights=demand.duration * demand.live_tokens, minlength=len(running))
    return replace(demand, duration=duration, running=running, live_tokens=held / duration)


def _run_in_order(
    plan: Plan, *, prefill_steps: np.ndarray, max_sequences: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step at which the prompt at each plan position is admitted, prefilled and finished."""
    free_at = [0.0] * max_sequences
    prefill_clock = 0.0
    admitted: list[float] = []
    prefilled: list[float] = []
    for prefill, generate in zip(prefill_steps.tolist(), plan.decode_tokens.tolist(), strict=True):
        at = max(free_at[0], prefill_clock)
        prefill_clock = at + prefill
        heapq.heapreplace(free_at, prefill_clock + generate)
        admitted.append(at)
        prefilled.append(prefill_clock)
    ready = np.array(prefilled)
    return np.array(admitted), ready, ready + plan.decode_tokens


@dataclass(frozen=True, slots=True)
class _Events:
    """At each `time`, `tokens` are taken (or, negative, freed) and `sequences` begin to decode (or end)."""

    time: np.ndarray
    tokens: np.ndarray | int = 0
    sequences: int = 0


def _integrate(events: tuple[_Events, ...]) -> Demand:
    time = np.concatenate([group.time for group in events])
    tokens = np.concatenate([np.broadcast_to(group.tokens, group.time.shape) for group in events]).astype(np.float64)
    sequences = np.concatenate([np.full(len(group.time), group.sequences) for group in events])
    # What ends at a moment frees its tokens before what begins then takes them.
    in_time = np.lexsort((tokens > 0, time))
    time, tokens, sequences = time[in_time], tokens[in_time], sequences[in_time]
    duration = np.diff(time)
    running = np.cumsum(sequences)[:-1].astype(np.float64)
    # Every running sequence adds a token a step.
    before = np.cumsum(tokens)[:-1] + np.concatenate((np.zeros(1), np.cumsum(duration * running)[:-1]))
    after = before + duration * running
    lasting = duration > 0
    return Demand(
        duration=duration[lasting],
        running=running[lasting],
        live_tokens=(before[lasting] + after[lasting]) / 2,
        peak_live_tokens=round(after[lasting].max()) if lasting.any() else round(before.max(initial=0.0)),
        num_steps=float(time[-1] - time[0]),
    )
