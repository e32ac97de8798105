"""Copy a block and sum it: `target[i] = source[i]`, and the XXH3 of 64 bits (default secret, seed 0) of the bytes.

Bytes of equal number in host memory. Bound by reading and writing memory once; the reference reads the block a second time, from the
second cache level if it fits there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import xxhash

from batchllm.kernels.native.library import load

_SMALLEST_BYTES = 4096
"""Below this, and in any case up to 240 bytes, for which XXH3 is another function, the reference is as good."""


def copy_checksum_reference(*, source: memoryview, target: memoryview) -> int:
    """Copies, then sums."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    return xxhash.xxh3_64_intdigest(target)


def copy_checksum(*, source: memoryview, target: memoryview) -> int:
    """The same value, in one pass where the native library is there. Other Python threads run meanwhile."""
    native = _native() if target.nbytes >= _SMALLEST_BYTES else None
    if native is None:
        return copy_checksum_reference(source=source, target=target)
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes into {target.nbytes}")
    if target.readonly:
        raise ValueError("target: must be writable")
    return int(native(_address(target), _address(source), source.nbytes))


@functools.cache
def _native() -> Callable[[int, int, int], int] | None:
    library = load()
    return None if isinstance(library, str) else library.copy_checksum


def _address(view: memoryview) -> int:
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
