"""The plan of a whole batch: in which order prompts run, and what they share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from batchllm.planner.drain import EngineWidth, Ordered, Width, drain_together, ends_by_length
from batchllm.planner.order import blend_order
from batchllm.planner.sort import sort_sequences
from batchllm.planner.store import PromptStore
from batchllm.planner.tree import PrefixTree, build_tree, shared_with_previous


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of a batch and its prefix tree, all over plan positions `[0, N)`.

    `order` int64 `[N]`: the prompt (number in the store) at each position. `shared_tokens` int32 `[N]`: leading tokens
    that some earlier position has too, always the one just before. `prompt_tokens` int32 `[N]`: the prompt's length.
    `tree_position` int64 `[N]`: each plan position's place in the tree's own, depth-first order, in which `tree.first`
    and `tree.last` count; the same number unless rows run in input order. `decode_tokens` int32 `[N]`: the most it may generate. A row with several samples is as many prompts.
    `width`: so many at once end with the longest row, see `planner/drain`; None: as many as the engine can.
    """

    order: np.ndarray
    tree: PrefixTree
    tree_position: np.ndarray
    shared_tokens: np.ndarray
    prompt_tokens: np.ndarray
    decode_tokens: np.ndarray
    width: Width | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.order)

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens asked for, counting shared ones each time."""
        return int(self.prompt_tokens.sum(dtype=np.int64))

    @property
    def unique_prompt_tokens(self) -> int:
        """Prompt tokens that must be computed if every shared run is computed once: the size of the trie."""
        return self.total_prompt_tokens - int(self.shared_tokens.sum(dtype=np.int64))

    @property
    def reuse_ceiling(self) -> float:
        """The exact greatest share of prompt tokens that need no computing; 0 for an empty plan."""
        return 1 - self.unique_prompt_tokens / self.total_prompt_tokens if self.num_prompts else 0.0

    @property
    def total_decode_tokens(self) -> int:
        """The most tokens the batch may generate."""
        return int(self.decode_tokens.sum(dtype=np.int64))

    @property
    def computed_tokens(self) -> np.ndarray:
        """int32 `[N]`: prompt tokens each position computes: what no earlier one has, and its last token always."""
        return self.prompt_tokens - np.minimum(self.shared_tokens, np.maximum(self.prompt_tokens - 1, 0))


def make_plan(
    store: PromptStore,
    *,
    prefix_sharing: bool,
    keep_order: bool = False,
    max_model_tokens: int | None = None,
    engine: EngineWidth | None = None,
    window_bytes: int = 256 << 20,
) -> Plan:
    """Plans all prompts of `store`. Memory stays below about 100 bytes a prompt plus three times `window_bytes`.

    `keep_order` runs the rows in the order in which they were staged; what they share is known all the same.
    Without `prefix_sharing` nothing is sorted and the tree is empty. `max_model_tokens`, of prompt and completion, caps
    what a prompt may generate. `engine`: what runs the plan; where lengths are certain, rows are ordered, and only so many run
    at once, that the batch ends together. Raises OSError if the staged tokens are cut short.
    """
    if prefix_sharing:
        tokens = sort_sequences(
            store.folder / "tokens.bin", offset=store.offset, length=store.length, window_bytes=window_bytes
        )
        order, tree = tokens.order, build_tree(tokens.lcp)
    else:
        order = np.arange(len(store.length), dtype=np.int64)
        tree = build_tree(np.zeros(len(order), dtype=np.int32))
    decode_tokens = most_decode_tokens(store, max_model_tokens=max_model_tokens)
    rows = {"prompt_tokens": store.length[order], "decode_tokens": decode_tokens[order]}
    chosen = Ordered(*blend_order(tree, **rows))
    if engine is not None and not keep_order and all(map(ends_by_length, store.sampling)):
        chosen = drain_together(tree, usual=chosen, **rows, engine=engine)
    order, tree = order[chosen.order], chosen.tree
    shared_tokens = shared_with_previous(tree)
    tree_position = np.arange(len(order), dtype=np.int64)
    if keep_order:
        tree_position[order] = tree_position.copy()
        tree = dataclasses.replace(tree, leaf_node=tree.leaf_node[tree_position])
        shared_tokens = shared_tokens[tree_position]
        order = np.arange(len(order), dtype=np.int64)
    return Plan(
        order=order,
        tree=tree,
        tree_position=tree_position,
        shared_tokens=shared_tokens,
        prompt_tokens=store.length[order],
        decode_tokens=decode_tokens[order],
        width=chosen.width,
    )


def most_decode_tokens(store: PromptStore, *, max_model_tokens: int | None) -> np.ndarray:
    """int32 `[N]` by prompt: the most tokens that each may generate."""
    limit = np.array([params.max_tokens for params in store.sampling], dtype=np.int32)[store.sampling_id]
    if max_model_tokens is None:
        return limit
    return np.minimum(limit, np.maximum(max_model_tokens - store.length, 0)).astype(np.int32)
