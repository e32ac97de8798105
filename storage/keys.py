"""The content key of a block: equal for equal keys and values, different for anything that changes them.

A block's keys and values depend on the model, how it was run, and every token up to the block's end. The key is
therefore a hash chain: each block's key covers its own tokens and its parent's key. BLAKE2b, never Python's `hash()`,
so that a key means the same in every process and on every machine.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEY_BYTES = 32
_DOMAIN = b"batchllm.kv"


@dataclass(frozen=True, slots=True)
class KeyScope:
    """What blocks must have in common to be interchangeable.

    `model` fingerprints weights and everything that shapes the arithmetic (rope theta, norm epsilon, adapter);
    `layout` names the order of values in a block; `dtype` their type; `namespace` separates what must not be shared
    even when equal.
    """

    model: bytes
    layout: str
    dtype: str
    namespace: str = ""


def _digest(domain: bytes, *parts: tuple[bytes, bytes]) -> bytes:
    """Hash of tagged parts. Each tag and value carries its length, so no two lists of parts give the same input."""
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=domain[:16])
    for tag, value in parts:
        state.update(struct.pack("<II", len(tag), len(value)))
        state.update(tag)
        state.update(value)
    return state.digest()


def root_key(scope: KeyScope) -> bytes:
    """The parent of a first block: 32 bytes that stand for the scope."""
    return _digest(
        _DOMAIN + b".root",
        (b"model", scope.model),
        (b"layout", scope.layout.encode()),
        (b"dtype", scope.dtype.encode()),
        (b"namespace", scope.namespace.encode()),
    )


def block_key(parent: bytes, token_ids: Sequence[int] | np.ndarray) -> bytes:
    """The key of the block that holds `token_ids` (any integer type) right after the block `parent` (or `root_key`)."""
    if len(parent) != KEY_BYTES:
        raise ValueError(f"a parent key has {KEY_BYTES} bytes, this one {len(parent)}")
    tokens = np.ascontiguousarray(token_ids, dtype="<i8")
    return _digest(_DOMAIN + b".blk", (b"parent", parent), (b"tokens", tokens.tobytes()))
