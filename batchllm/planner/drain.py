"""How a batch whose lengths are certain ends together, instead of with its longest rows alone.

A row that generates L tokens takes L steps, and no batch ends before it. Rows that are all started at once end one by one, and the longest
runs on beside ever fewer. If all of them generate T tokens, T / L at once are done in the same L steps, provided that the longest start first.
Steps that are all about as wide cost no more than wide ones and then narrow ones, as long as a row more costs about the same in each.

That is only known where nothing but its length can end a row, and only worth another order where the usual one leaves a tail. Longest first over
everything can starve prefill, when long decodes come with short prompts, and a narrow batch can lose more than it evens out, when
only a row or two are long. So both orders are simulated, and the usual one stays unless the other takes as few steps and no more time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchllm.planner.order import blend_order
from batchllm.planner.timing import run_in_order
from batchllm.planner.tree import PrefixTree, shared_with_previous
from batchllm.prompt import SamplingParams

WORTH = 0.1
"""Share of the steps with fewer than a quarter of the sequences that is worth another order."""

_MOST_MORE = 1.005
"""Steps, or time, over those of the usual order: what a simulation does not know may be as much."""

_WIDER = 1.125
"""From one width that is tried to the next."""

_STEP_COST = ((0, 0.0), (1, 1.0), (16, 1.4), (32, 1.6), (64, 2.3), (128, 3.4), (256, 5.0))
"""Seconds of a decoding step by the sequences in it, over those of a step with one; beyond the last as from there on. Rows share a read of
the weights: the shape of the curve is what counts. It is assumed, after steps of earlier kernels on two cores, not measured here; a GPU's is flatter.
"""


@dataclass(frozen=True, slots=True)
class Width:
    """How many sequences run at once: `most`, and `fewest`, below which the machine is not busy."""

    most: int
    fewest: int


@dataclass(frozen=True, slots=True)
class EngineWidth:
    """The width of an engine that nothing narrows, and the rows of a step."""

    width: Width
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an order comes to at a width: its steps, the share of them with fewer than a quarter of the most sequences, and their cost."""

    num_steps: float
    tail_share: float
    cost: float


@dataclass(frozen=True, slots=True)
class Ordered:
    """Prompts in an order: `order` int64 `[N]`, the old position at each new one, and the tree over the new ones. `width` as in `Plan`."""

    order: np.ndarray
    tree: PrefixTree
    width: Width | None = None


def ends_by_length(params: SamplingParams) -> bool:
    """Whether a row with these settings generates exactly `max_tokens`, whatever it says."""
    return params.ignore_eos and not params.stop and not params.stop_token_ids and params.grammar is None


def drain_together(
    tree: PrefixTree, *, usual: Ordered, prompt_tokens: np.ndarray, decode_tokens: np.ndarray, engine: EngineWidth
) -> Ordered:
    """Longest decode first and no wider than it takes to end with the longest row; `usual` where that would be no better, or slower.

    Int `[N]` by position in `tree`: the prompt's length, and the tokens that it generates, for certain.
    """
    longest, total = float(decode_tokens.max(initial=0)), float(decode_tokens.sum(dtype=np.int64))
    # The tail is a part of the longest row's steps, and there are total / most at least.
    if engine.width.most < 2 or longest * engine.width.most < WORTH * total:
        return usual

    def look_at(ordered: Ordered, width: int) -> Outlook:
        prompt = prompt_tokens[ordered.order]
        found = np.minimum(shared_with_previous(ordered.tree), np.maximum(prompt - 1, 0))
        return outlook(
            computed_tokens=prompt - found,
            decode_tokens=decode_tokens[ordered.order],
            max_sequences=width,
            step_tokens=engine.step_tokens,
        )

    before = look_at(usual, engine.width.most)
    if before.tail_share < WORTH:
        return usual
    order, reordered = blend_order(tree, prompt_tokens=prompt_tokens, decode_tokens=decode_tokens, longest_first=True)
    for most in _widths(math.ceil(total / longest), engine.width):
        ordered = Ordered(order, reordered, Width(most=most, fewest=min(engine.width.fewest, most)))
        found = look_at(ordered, most)
        is_no_slower = found.num_steps <= _MOST_MORE * before.num_steps and found.cost <= _MOST_MORE * before.cost
        if is_no_slower and found.tail_share <= before.tail_share - WORTH / 2:
            return ordered
    return usual


def outlook(*, computed_tokens: np.ndarray, decode_tokens: np.ndarray, max_sequences: int, step_tokens: int) -> Outlook:
    """Simulates prompts in the given order, as `simulate_demand` does. Int `[N]` each, N at least 1."""
    _, prefilled, finished = run_in_order(
        computed_tokens=computed_tokens,
        decode_tokens=decode_tokens,
        max_sequences=max_sequences,
        step_tokens=step_tokens,
    )
    time = np.concatenate((prefilled, finished))
    change = np.repeat(np.array([1, -1]), len(prefilled))
    # What ends at a moment makes room before what begins then takes it.
    in_time = np.lexsort((change, time))
    time, running = time[in_time], np.cumsum(change[in_time])[:-1]
    duration = np.diff(time)
    lasting = duration > 0
    duration, running = duration[lasting], running[lasting]
    num_steps = float(time[-1])
    if not len(running):
        return Outlook(num_steps, tail_share=0.0, cost=0.0)
    after_last_wide = np.flatnonzero(running >= running.max() / 4)[-1] + 1
    return Outlook(
        num_steps,
        tail_share=float(duration[after_last_wide:].sum() / num_steps),
        cost=float(duration @ _step_cost(running)),
    )


def _widths(enough: int, width: Width) -> Iterator[int]:
    """From `enough` up to the most."""
    most = max(enough, width.fewest)
    while most < width.most:
        yield most
        most = max(most + 1, int(most * _WIDER))
    yield width.most


def _step_cost(running: np.ndarray) -> np.ndarray:
    rows, seconds = np.array(_STEP_COST).T
    slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
    return np.interp(running, rows, seconds) + np.maximum(running - rows[-1], 0) * slope
