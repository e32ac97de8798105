"""The block pool against a plain count of references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.engine.blocks import BlockPool, num_blocks_for


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_blocks=st.integers(0, 12))
def test_references_add_up_whatever_is_taken_shared_and_given_back(data: st.DataObject, num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    counts = dict.fromkeys(range(num_blocks), 0)
    for _ in range(data.draw(st.integers(0, 30))):
        owned = sorted(block for block, count in counts.items() if count)
        operation = data.draw(st.sampled_from(["allocate", "share", "release", "release_each"]))
        if operation == "allocate":
            taken = pool.allocate(data.draw(st.integers(0, pool.num_free))).tolist()
            assert len(set(taken)) == len(taken)
            for block in taken:
                assert counts[block] == 0, "an owned block was handed out"
                counts[block] = 1
        elif operation == "release_each":
            references = [block for block in owned for _ in range(counts[block])]
            chosen = data.draw(st.permutations(references))[: data.draw(st.integers(0, len(references)))]
            pool.release_each(np.array(chosen, dtype=np.int32))
            for block in chosen:
                counts[block] -= 1
        elif owned:
            chosen = data.draw(st.lists(st.sampled_from(owned), unique=True))
            change = 1 if operation == "share" else -1
            (pool.share if operation == "share" else pool.release)(np.array(chosen, dtype=np.int32))
            for block in chosen:
                counts[block] += change
        pool.check_integrity()
        assert pool.reference_counts.tolist() == [counts[block] for block in range(num_blocks)]
        assert pool.num_free == sum(count == 0 for count in counts.values())
        assert pool.num_used == num_blocks - pool.num_free


def test_what_nobody_owns_cannot_be_shared_or_released() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.share(np.array([0], dtype=np.int32))
    with pytest.raises(AssertionError):
        pool.release(np.array([0], dtype=np.int32))
    with pytest.raises(AssertionError):
        pool.allocate(3)
    taken = pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.release_each(np.repeat(taken, 2))


def test_the_block_freed_last_is_handed_out_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.release(blocks[1:2])
    assert pool.allocate(1).tolist() == blocks[1:2].tolist()


@pytest.mark.parametrize(("tokens", "size", "blocks"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5)])
def test_blocks_for_tokens(tokens: int, size: int, blocks: int) -> None:
    assert num_blocks_for(tokens, size) == blocks
