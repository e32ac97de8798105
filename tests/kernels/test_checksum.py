"""A copy that is summed on the way: same bytes, same value as the xxhash package, on every path."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from batchllm.kernels import checksum
from batchllm.kernels.native import library as native_library

SIZES = [1, 240, 241, 4095, 4096, 4097, 4160, 5119, 5120, 5121, 65_537, 368_640]


@pytest.fixture(params=native_library.PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each path of instructions in turn."""
    library = native_library.load()
    if isinstance(library, str):
        pytest.skip(f"needs the native library: {library}")
    if request.param not in library.runnable_paths():
        pytest.skip(f"needs a processor with {request.param}")
    before = library.path_name()
    library.use_path(request.param)
    yield request.param
    library.use_path(before)


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 64])
def test_bytes_and_value_are_those_of_a_copy_and_of_the_package(path: str, num_bytes: int, shift: int) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 1, dtype=np.uint8)[1:]
    room = np.full(num_bytes + 256, 7, dtype=np.uint8)
    start = 64 - room.ctypes.data % 64 + shift
    target = room[start : start + num_bytes]
    value = checksum.copy_checksum(source=memoryview(source), target=memoryview(target))
    assert value == xxhash.xxh3_64_intdigest(source)
    assert np.array_equal(target, source)
    assert (room[:start] == 7).all() and (room[start + num_bytes :] == 7).all()


def test_each_byte_counts(path: str) -> None:
    source = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    target = np.empty_like(source)
    values = {checksum.copy_checksum(source=memoryview(source), target=memoryview(target))}
    for number in range(0, 5000, 7):
        source[number] ^= 1 << number % 8
        values.add(checksum.copy_checksum(source=memoryview(source), target=memoryview(target)))
        source[number] ^= 1 << number % 8
    assert len(values) == 1 + len(range(0, 5000, 7))


def test_without_the_library_the_value_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    targets = np.empty_like(source), np.empty_like(source)
    values = [checksum.copy_checksum(source=memoryview(source), target=memoryview(targets[0]))]
    monkeypatch.setattr(checksum, "_native", lambda: None)
    values.append(checksum.copy_checksum(source=memoryview(source), target=memoryview(targets[1])))
    assert values == [xxhash.xxh3_64_intdigest(source)] * 2
    assert np.array_equal(targets[0], source) and np.array_equal(targets[1], source)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError):
        checksum.copy_checksum(source=memoryview(bytes(8192)), target=memoryview(bytearray(8193)))
