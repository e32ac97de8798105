"""Works out what a plan means before it runs: sharing, memory, time, the bottleneck and advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from batchllm.planner.advice import PlanFacts, advise
from batchllm.planner.cost import PrefillWork, Rates, predict
from batchllm.planner.demand import Demand, compact, simulate_demand
from batchllm.planner.explanation import Explanation, HistogramBar, LoadLevel, SharedRun
from batchllm.planner.plan import Plan
from batchllm.planner.rates import EXPECT_ALL, Expected
from batchllm.planner.store import PromptStore
from batchllm.planner.work import prompt_pairs

NUM_BIGGEST_NODES = 10
TEXT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model's shape says about keys and values. `context_tokens` is prompt and completion together."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype_bytes: int
    context_tokens: int

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_dtype_bytes


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine may do at once; `read_chunk`: tokens, by whole ones of which sequences read together what they share."""

    max_sequences: int
    step_tokens: int
    read_chunk: int


def explain(
    plan: Plan,
    store: PromptStore,
    *,
    model: ModelFacts,
    limits: EngineLimits,
    rates: Rates | None,
    decode_text: Callable[[Sequence[int]], str],
    expected: Expected = EXPECT_ALL,
) -> Explanation:
    """Explains `plan`; reads only the tokens that the biggest nodes start with, through `store`.

    `expected`: of the tokens that a row may generate, those that it is expected to. Without `rates` no times are predicted.
    """
    # A row that may generate generates something, however small the share.
    expected_tokens, sampled_tokens = (
        np.minimum(np.maximum(np.rint(plan.decode_tokens * share), 1), plan.decode_tokens)
        for share in (expected.generated_share, expected.generated_share * expected.sampled_share)
    )
    demand = simulate_demand(
        replace(plan, decode_tokens=sampled_tokens.astype(np.int32)),
        max_sequences=limits.max_sequences,
        step_tokens=limits.step_tokens,
        read_chunk=limits.read_chunk,
    )
    num_computed = int(plan.computed_tokens.sum(dtype=np.int64))
    prefill = PrefillWork(tokens=num_computed, pairs=prompt_pairs(plan), found=plan.total_prompt_tokens - num_computed)
    prediction = None
    if rates is not None:
        prediction = predict(
            demand,
            prefill=prefill,
            rates=rates,
            kv_bytes_per_token=model.kv_bytes_per_token,
        )
    levels = compact(demand)
    row_tokens = plan.prompt_tokens.astype(np.int64) + plan.decode_tokens
    facts = PlanFacts(
        plan=plan,
        demand=demand,
        prediction=prediction,
        context_tokens=model.context_tokens,
        max_sequences=limits.max_sequences,
    )
    return Explanation(
        num_rows=len(np.unique(store.row_index)),
        num_prompts=plan.num_prompts,
        prompt_tokens=plan.total_prompt_tokens,
        unique_prompt_tokens=plan.unique_prompt_tokens,
        computed_prompt_tokens=prefill.tokens,
        prompt_pairs=prefill.pairs,
        reuse_ceiling=plan.reuse_ceiling,
        decode_tokens=plan.total_decode_tokens,
        expected_decode_tokens=int(expected_tokens.sum()),
        max_sequences=limits.max_sequences,
        ends_together=plan.width is not None,
        num_nodes=plan.tree.num_nodes,
        histogram=token_histogram(plan.prompt_tokens),
        biggest_nodes=biggest_nodes(plan, store, decode_text=decode_text),
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_bytes_per_row_mean=round(float(row_tokens.mean()) * model.kv_bytes_per_token) if plan.num_prompts else 0,
        kv_bytes_per_row_most=int(row_tokens.max(initial=0)) * model.kv_bytes_per_token,
        peak_live_tokens=demand.peak_live_tokens,
        peak_kv_bytes=demand.peak_live_tokens * model.kv_bytes_per_token,
        num_steps=round(demand.num_steps),
        tail_share=demand.tail_share,
        load=load_levels(levels),
        prediction=prediction,
        advice=advise(facts),
    )


def load_levels(demand: Demand) -> tuple[LoadLevel, ...]:
    """The stretches of a load, one after the other."""
    columns = (getattr(demand, field.name).tolist() for field in fields(LoadLevel))
    return tuple(LoadLevel(*values) for values in zip(*columns, strict=True))


def token_histogram(prompt_tokens: np.ndarray) -> tuple[HistogramBar, ...]:
    """Prompts by length, in bars that double in width, from the shortest that occurs to the longest."""
    level = np.frexp(prompt_tokens.astype(np.float64))[1] - 1
    counts = np.bincount(np.maximum(level, 0))
    occurring = np.flatnonzero(counts)
    if not len(occurring):
        return ()
    return tuple(
        HistogramBar(low=1 << k, high=(2 << k) - 1, num_prompts=int(counts[k]))
        for k in range(int(occurring[0]), int(occurring[-1]) + 1)
    )


def biggest_nodes(
    plan: Plan, store: PromptStore, *, decode_text: Callable[[Sequence[int]], str]
) -> tuple[SharedRun, ...]:
    """The nodes that save most tokens: each of their prompts but the first finds them computed."""
    tree = plan.tree
    saved = (tree.end - tree.start) * (tree.last - tree.first - 1)
    position = np.empty_like(plan.tree_position)  # by place in the tree's order
    position[plan.tree_position] = np.arange(plan.num_prompts)
    runs = []
    for node in np.argsort(-saved, kind="stable")[:NUM_BIGGEST_NODES].tolist():
        start, end = int(tree.start[node]), int(tree.end[node])
        tokens = store.tokens(int(plan.order[position[tree.first[node]]]))[start : min(end, start + TEXT_TOKENS)]
        runs.append(
            SharedRun(
                start=start,
                end=end,
                num_prompts=int(tree.last[node] - tree.first[node]),
                tokens_saved=int(saved[node]),
                text=decode_text(tokens.tolist()),
            )
        )
    return tuple(runs)
