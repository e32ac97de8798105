"""What running the plan will hold at each moment: a cheap simulation of admission in plan order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from batchllm.planner.intervals import interval_max, interval_min
from batchllm.planner.plan import Plan
from batchllm.planner.timing import run_in_order
from batchllm.planner.tree import own_tokens

FRONT_STEPS = 8
"""Into so many steps a chunk is cut where sequences share its front only: they read whole ones of them together."""


@dataclass(frozen=True, slots=True)
class Demand:
    """How a plan's load goes up and down, in decode steps, as stretches between the moments at which it changes.

    Per stretch, float64 `[E]`: `duration` in steps, `running`, the sequences that decode, and of a step in it, on average:
    `live_tokens`, whose keys and values are held, a shared run once; `read_tokens`, whose keys and values the decoding
    sequences read, what they read together once; `spared_tokens`, the reads that reading together spares.
    `peak_live_tokens` is the greatest at any moment and `num_steps` the whole length.
    """

    duration: np.ndarray
    running: np.ndarray
    live_tokens: np.ndarray
    read_tokens: np.ndarray
    spared_tokens: np.ndarray
    peak_live_tokens: int
    num_steps: float

    @property
    def tail_share(self) -> float:
        """Share of the steps after the moment from which fewer than a quarter of the most sequences run."""
        if not len(self.running):
            return 0.0
        after_last_wide = np.flatnonzero(self.running >= self.running.max() / 4)[-1] + 1
        return float(self.duration[after_last_wide:].sum() / self.num_steps)


def simulate_demand(plan: Plan, *, max_sequences: int, step_tokens: int, read_chunk: int) -> Demand:
    """Admits sequences in plan order, `max_sequences` at a time and as many as fit; each generates all it may.

    A step computes `step_tokens` tokens: one for each running sequence, prompt tokens with the rest. Neighbours read what they share
    together as far as it fills chunks of `read_chunk` tokens, and steps of the last chunk. Memory is taken as unlimited, so the peak is
    what the plan asks for. One pass with a heap, O(N log N).
    """
    if plan.num_prompts == 0:
        nothing = np.zeros(0)
        return Demand(nothing, nothing, nothing, nothing, nothing, peak_live_tokens=0, num_steps=0.0)
    admitted, prefilled, finished = run_in_order(
        computed_tokens=plan.computed_tokens,
        decode_tokens=plan.decode_tokens,
        max_sequences=max_sequences,
        step_tokens=step_tokens,
    )

    tree, place = plan.tree, plan.tree_position
    intervals = {"first": tree.first, "last": tree.last}
    own = own_tokens(tree, plan.prompt_tokens)
    span = tree.end - tree.start
    # In input order those that share are no neighbours, and each reads alone.
    is_tree_order = bool((place == np.arange(len(place))).all())
    fronts = _fronts(plan, read_chunk)
    front = fronts.tokens * is_tree_order
    together = ((plan.prompt_tokens - own) // read_chunk * read_chunk + fronts.of_prompt) * is_tree_order
    node_together = (tree.end // read_chunk - tree.start // read_chunk) * read_chunk * is_tree_order
    alone = plan.prompt_tokens - together
    node_admitted, node_prefilled = (interval_min(_by_tree(time, place), **intervals) for time in (admitted, prefilled))
    node_finished = interval_max(_by_tree(finished, place), **intervals)
    # The difference of the times, not the count, so that what the running sequences added cancels exactly.
    generated = finished - prefilled
    return _integrate(
        (
            _Events(time=admitted, tokens=own),
            _Events(time=node_admitted, tokens=span),
            _Events(time=node_prefilled, read=node_together, spared=-node_together),
            _Events(time=node_finished, tokens=-span, read=-node_together, spared=node_together),
            _Events(time=interval_min(prefilled, **fronts.interval), read=front, spared=-front),
            _Events(time=interval_max(finished, **fronts.interval), read=-front, spared=front),
            _Events(time=prefilled, sequences=1, read=alone, spared=together),
            _Events(time=finished, sequences=-1, tokens=-own - generated, read=-alone - generated, spared=-together),
        )
    )


def compact(demand: Demand) -> Demand:
    """The same load with one stretch for each number of running sequences, fewest first; predictions from it are equal."""
    running, place = np.unique(demand.running, return_inverse=True)
    duration = np.bincount(place, weights=demand.duration, minlength=len(running))

    def mean(tokens: np.ndarray) -> np.ndarray:
        return np.bincount(place, weights=demand.duration * tokens, minlength=len(running)) / duration

    return replace(
        demand,
        duration=duration,
        running=running,
        live_tokens=mean(demand.live_tokens),
        read_tokens=mean(demand.read_tokens),
        spared_tokens=mean(demand.spared_tokens),
    )


@dataclass(frozen=True, slots=True)
class _Fronts:
    """Of groups of neighbours that read the front of a chunk together: its `tokens`, and the plan positions `[first, last)` of each group;
    `of_prompt` int64 `[N]`: the tokens that each prompt reads so, 0 outside a group.
    """

    tokens: np.ndarray
    first: np.ndarray
    last: np.ndarray
    of_prompt: np.ndarray

    @property
    def interval(self) -> dict[str, np.ndarray]:
        return {"first": self.first, "last": self.last}


def _fronts(plan: Plan, read_chunk: int) -> _Fronts:
    """Who reads the chunk together in which the leaf node ends, in a plan in the tree's order.

    As `engine/step` has it: in whole steps, neighbours of one node, and not where a prompt reads so many chunks alone that it is better
    left whole.
    """
    tree, step = plan.tree, max(1, read_chunk // FRONT_STEPS)
    leaf = tree.leaf_node
    end = np.append(tree.end, 0)[leaf].astype(np.int64)
    front = end % read_chunk // step * step
    num_chunks = -(-(plan.prompt_tokens + plan.decode_tokens) // read_chunk)
    front = np.where((end < read_chunk) & (num_chunks > 1) & (front <= num_chunks * step), 0, front)
    joins = (front[1:] > 0) & (front[:-1] > 0) & (leaf[1:] == leaf[:-1])
    before, behind = np.append(False, joins), np.append(joins, False)
    first, last = np.flatnonzero(behind & ~before), np.flatnonzero(before & ~behind) + 1
    return _Fronts(tokens=front[first], first=first, last=last, of_prompt=np.where(before | behind, front, 0))


def _by_tree(values: np.ndarray, tree_position: np.ndarray) -> np.ndarray:
    """Values by plan position in the tree's own order, in which its nodes count."""
    in_tree = np.empty_like(values)
    in_tree[tree_position] = values
    return in_tree


@dataclass(frozen=True, slots=True)
class _Events:
    """At each `time` the load changes by so many tokens held, tokens read in a step, reads spared, and decoding `sequences`."""

    time: np.ndarray
    tokens: np.ndarray | int = 0
    read: np.ndarray | int = 0
    spared: np.ndarray | int = 0
    sequences: int = 0


def _integrate(events: tuple[_Events, ...]) -> Demand:
    time = np.concatenate([group.time for group in events])
    held = _column(events, "tokens")
    # What ends at a moment frees its tokens before what begins then takes them.
    in_time = np.lexsort((held > 0, time))
    duration = np.diff(time[in_time])
    running, read, spared = (np.cumsum(_column(events, name)[in_time])[:-1] for name in ("sequences", "read", "spared"))
    # Every running sequence adds a token a step, which is held, and read from then on.
    growth = duration * running
    grown = np.concatenate((np.zeros(1), np.cumsum(growth)[:-1]))
    before = np.cumsum(held[in_time])[:-1] + grown
    after = before + growth
    lasting = duration > 0
    is_read = lasting & (running > 0)
    return Demand(
        duration=duration[lasting],
        running=running[lasting],
        live_tokens=((before + after) / 2)[lasting],
        read_tokens=np.where(is_read, read + grown + growth / 2, 0.0)[lasting],
        # Between two sequences of a node nobody reads it.
        spared_tokens=np.where(is_read, np.maximum(spared, 0.0), 0.0)[lasting],
        peak_live_tokens=round(after[lasting].max()) if lasting.any() else round(before.max(initial=0.0)),
        num_steps=float(time.max() - time.min()),
    )


def _column(events: tuple[_Events, ...], name: str) -> np.ndarray:
    """float64: one of the changes of all events, in the order of their times' concatenation."""
    return np.concatenate(
        [np.broadcast_to(np.asarray(getattr(group, name), dtype=np.float64), group.time.shape) for group in events]
    )
