"""The prompt store gives back what was put in, by place, in any order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner.store import PromptStore
from batchllm.prompt import SamplingParams


def append(store: PromptStore, prompts: list[list[int]], *, first_row: int, sampling: SamplingParams) -> None:
    store.append_batch(
        row_index=np.arange(first_row, first_row + len(prompts)),
        lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        tokens=np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
        sampling_ids=np.full(len(prompts), store.intern_sampling(sampling), dtype=np.int32),
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_prompts_come_back_by_place_in_any_order(data: st.DataObject) -> None:
    prompt = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6000)
    batches = data.draw(st.lists(st.lists(prompt, min_size=1, max_size=4), min_size=1, max_size=4))
    with tempfile.TemporaryDirectory() as folder:
        store = PromptStore(folder)
        for number, batch in enumerate(batches):
            append(store, batch, first_row=number * 100, sampling=SamplingParams(max_tokens=1 + number % 2))
        store.finish()
        flat = [prompt for batch in batches for prompt in batch]
        order = data.draw(st.lists(st.integers(0, len(flat) - 1), max_size=20))
        assert [store.tokens(place).tolist() for place in order] == [flat[place] for place in order]
        assert [store.tokens(place).tolist() for place in range(len(flat))] == flat
        assert store.num_prompts == len(flat) and store.num_tokens == sum(map(len, flat))
        assert len(store.sampling) == min(2, len(batches))
        store.close()


def test_a_prompt_carries_its_row_and_sampling(tmp_path: Path) -> None:
    store = PromptStore(tmp_path)
    append(store, [[1], [2, 3]], first_row=5, sampling=SamplingParams(seed=3))
    store.finish()
    prompt = store.prompt(1)
    assert (prompt.row_index, prompt.token_ids.tolist(), prompt.sampling.seed) == (6, [2, 3], 3)
    assert store.offset.tolist() == [0, 1]
    assert prompt.token_ids.dtype == np.int32


def test_a_store_without_prompts_is_empty_and_a_cut_file_is_an_error(tmp_path: Path) -> None:
    store = PromptStore(tmp_path / "empty")
    store.finish()
    assert store.num_prompts == 0 and store.length.dtype == np.int32
    store = PromptStore(tmp_path / "cut")
    append(store, [[1, 2, 3]], first_row=0, sampling=SamplingParams())
    store.finish()
    (tmp_path / "cut/tokens.bin").write_bytes(b"\x01\x00\x00\x00")
    with pytest.raises(OSError, match="cut short"):
        store.tokens(0)


def test_a_row_with_several_samples_is_as_many_prompts_over_the_same_tokens(tmp_path: Path) -> None:
    store = PromptStore(tmp_path)
    append(store, [[1, 2]], first_row=4, sampling=SamplingParams(n=3))
    append(store, [[3]], first_row=5, sampling=SamplingParams())
    store.finish()
    assert store.num_prompts == 4
    assert list(zip(store.row_index.tolist(), store.sample_index.tolist(), strict=True)) == [
        (4, 0),
        (4, 1),
        (4, 2),
        (5, 0),
    ]
    assert [store.tokens(place).tolist() for place in (2, 3, 0)] == [[1, 2], [3], [1, 2]]
    assert (tmp_path / "tokens.bin").stat().st_size == 12
    store.close()
