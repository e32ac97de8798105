"""Staged prompts for planning tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from batchllm.planner.store import PromptStore
from batchllm.prompt import SamplingParams


@pytest.fixture(scope="session")
def stage_prompts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., PromptStore]]:
    """A function (prompts, max_tokens=None, ignore_eos=False) -> a finished store in a folder of its own; it closes the store before."""
    open_stores: list[PromptStore] = []

    def stage(prompts: list[list[int]], max_tokens: list[int] | None = None, ignore_eos: bool = False) -> PromptStore:
        while open_stores:
            open_stores.pop().close()
        store = PromptStore(tmp_path_factory.mktemp("prompts"))
        open_stores.append(store)
        limits = max_tokens or [16] * len(prompts)
        store.append_batch(
            row_index=np.arange(len(prompts)),
            lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
            tokens=np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
            sampling_ids=np.array(
                [store.intern_sampling(SamplingParams(max_tokens=limit, ignore_eos=ignore_eos)) for limit in limits],
                dtype=np.int32,
            ),
        )
        store.finish()
        return store

    yield stage
    while open_stores:
        open_stores.pop().close()
