"""The least work that a plan asks for, in tokens, whatever machine and model run it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from batchllm.planner.intervals import interval_max, interval_sum
from batchllm.planner.plan import Plan
from batchllm.planner.tree import own_tokens


@dataclass(frozen=True, slots=True)
class PlanWork:
    """The fewest rows, attention pairs and reads of keys and values that give the answers of a plan.

    `prompt_tokens`: distinct ones, each computed once. `decode_tokens`: generated ones that are computed; a sample's first comes out of
    its prompt, which makes `num_samples` of them, and its last one is never read. `prompt_pairs`, `decode_pairs`: (row, token it
    attends to). `decode_steps`: no fewer can be, since a sample's tokens come one after the other and at most so many samples run at
    once. `kv_tokens_read`: tokens whose keys and values these steps read, a shared run once a step.
    """

    prompt_tokens: int = 0
    prompt_pairs: int = 0
    num_samples: int = 0
    decode_tokens: int = 0
    decode_pairs: int = 0
    decode_steps: float = 0.0
    kv_tokens_read: float = 0.0

    def plus(self, other: PlanWork) -> PlanWork:
        """The work of both plans, one after the other."""
        return PlanWork(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


def plan_work(plan: Plan, *, generated_tokens: np.ndarray, max_sequences: int) -> PlanWork:
    """The work of the samples that were answered: `generated_tokens` int `[N]` by plan position, 0 where there is no answer.

    `max_sequences`: how many samples run at once, at most.
    """
    generated = np.asarray(generated_tokens, dtype=np.int64)
    answered = generated > 0
    if not answered.any():
        return PlanWork()
    tree = plan.tree
    decoded = np.maximum(generated - 1, 0)
    prompt = plan.prompt_tokens.astype(np.int64)
    shared_end = prompt - own_tokens(tree, prompt)
    # Nodes count in the tree's own order.
    in_tree = np.zeros_like(decoded)
    in_tree[plan.tree_position] = decoded
    is_used = np.zeros_like(decoded)
    is_used[plan.tree_position] = answered
    start, end = tree.start.astype(np.int64), tree.end.astype(np.int64)
    used_nodes = interval_sum(is_used, first=tree.first, last=tree.last) > 0
    node_tokens = np.where(used_nodes, end - start, 0)
    own = np.where(answered, prompt - shared_end, 0)
    node_steps = _least_steps(
        interval_max(in_tree, first=tree.first, last=tree.last),
        interval_sum(in_tree, first=tree.first, last=tree.last),
        max_sequences,
    )
    # Row i of a decode reads the prompt, the i tokens generated before it, and its own.
    tail_pairs = decoded * (decoded + 1) // 2
    decode_pairs = int((decoded * prompt + tail_pairs)[answered].sum())
    private_reads = int((decoded * own + tail_pairs)[answered].sum())
    return PlanWork(
        prompt_tokens=int(node_tokens.sum() + own.sum()),
        prompt_pairs=int(
            _pairs(start, end)[used_nodes].sum() + _pairs(shared_end, prompt)[answered].sum(),
        ),
        num_samples=int(answered.sum()),
        decode_tokens=int(decoded.sum()),
        decode_pairs=decode_pairs,
        decode_steps=float(_least_steps(decoded.max(), decoded.sum(), max_sequences)),
        kv_tokens_read=float((node_tokens * node_steps).sum() + private_reads),
    )


def prompt_pairs(plan: Plan) -> int:
    """Pairs of a prompt token and a token that it attends to, itself included, with each distinct token computed once."""
    tree = plan.tree
    prompt = plan.prompt_tokens.astype(np.int64)
    shared_end = prompt - own_tokens(tree, prompt)
    nodes = _pairs(tree.start.astype(np.int64), tree.end.astype(np.int64))
    return int(nodes.sum() + _pairs(shared_end, prompt).sum())


def _pairs(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Pairs of the rows at depths [start, end) with what stands up to them, themselves included."""
    return (end * (end + 1) - start * (start + 1)) // 2


def _least_steps(longest: np.ndarray, total: np.ndarray, max_sequences: int) -> np.ndarray:
    return np.maximum(longest, total / max_sequences)
