from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from batchllm.storage.keys import KeyScope, block_key, root_key

SCOPE = KeyScope(model=b"weights", layout="block-major", dtype="bf16", namespace="")


def chain_keys(scope: KeyScope, token_ids: Sequence[int] | np.ndarray, *, block_size: int) -> list[bytes]:
    """Keys of the full blocks of a token sequence, in order."""
    keys = [root_key(scope)]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        keys.append(block_key(keys[-1], token_ids[start : start + block_size]))
    return keys[1:]


def test_each_part_of_the_scope_changes_the_key() -> None:
    scopes = [
        SCOPE,
        KeyScope(model=b"weights, rope_theta 10000", layout="block-major", dtype="bf16"),
        KeyScope(model=b"weights", layout="layer-major", dtype="bf16"),
        KeyScope(model=b"weights", layout="block-major", dtype="fp16"),
        KeyScope(model=b"weights", layout="block-major", dtype="bf16", namespace="tenant"),
    ]
    keys = [chain_keys(scope, [1, 2, 3, 4], block_size=4)[0] for scope in scopes]
    assert len(set(keys)) == len(scopes)


def test_text_moved_between_neighbouring_parts_changes_the_key() -> None:
    scopes = [
        KeyScope(model=b"m", layout="a", dtype="bc", namespace=""),
        KeyScope(model=b"m", layout="ab", dtype="c", namespace=""),
        KeyScope(model=b"m", layout="", dtype="abc", namespace=""),
        KeyScope(model=b"m", layout="", dtype="", namespace="abc"),
        KeyScope(model=b"mabc", layout="", dtype="", namespace=""),
    ]
    assert len({root_key(scope) for scope in scopes}) == len(scopes)


def test_the_same_word_as_adapter_and_as_namespace_gives_different_keys() -> None:
    as_adapter = KeyScope(model=b"COLLIDE_SALT", layout="l", dtype="bf16", namespace="")
    as_namespace = KeyScope(model=b"", layout="l", dtype="bf16", namespace="COLLIDE_SALT")
    assert root_key(as_adapter) != root_key(as_namespace)


def test_equal_tokens_after_different_prefixes_have_different_keys() -> None:
    first = chain_keys(SCOPE, [1, 2, 3, 4], block_size=2)
    second = chain_keys(SCOPE, [9, 2, 3, 4], block_size=2)
    assert first[1] != second[1]


def test_sequences_with_a_common_prefix_share_exactly_its_full_blocks() -> None:
    first = chain_keys(SCOPE, [1, 2, 3, 4, 5, 6, 7], block_size=2)
    second = chain_keys(SCOPE, [1, 2, 3, 4, 5, 9, 7], block_size=2)
    assert len(first) == 3
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False]


def test_cutting_the_same_tokens_into_other_blocks_gives_other_keys() -> None:
    by_size = [set(chain_keys(SCOPE, list(range(12)), block_size=size)) for size in (2, 3, 4, 6)]
    for first, second in itertools.combinations(by_size, 2):
        assert not first & second


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_the_integer_type_of_the_tokens_does_not_matter(dtype: type) -> None:
    tokens = [0, 1, 49151, 7]
    assert chain_keys(SCOPE, np.array(tokens, dtype), block_size=2) == chain_keys(SCOPE, tokens, block_size=2)


def test_a_parent_that_is_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        block_key(b"short", [1])


def test_keys_are_equal_in_processes_with_different_hash_seeds() -> None:
    program = (
        "from batchllm.storage.keys import *\n"
        "print(block_key(root_key(KeyScope(model=b'w', layout='l', dtype='d')), [1, 2, 3]).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2", "random")
    }
    assert outputs == {chain_keys(KeyScope(model=b"w", layout="l", dtype="d"), [1, 2, 3], block_size=3)[0].hex()}
