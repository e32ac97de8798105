"""Memory below large tensors."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from batchllm.kernels.native.memory import advise_huge_pages, find_memory, release_free_memory
from batchllm.kernels.native.row_memory import empty_rows

MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def untouched(num_bytes: int) -> torch.Tensor:
    # What torch.empty returns is filled in these tests.
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def test_memory_is_found_for_the_first_bytes_only_and_what_they_hold_stays() -> None:
    tensor = untouched(96 * MIB)
    advise_huge_pages(tensor)
    tensor[:100] = torch.arange(100, dtype=torch.uint8)
    before = resident_bytes()
    if not find_memory(tensor, num_bytes=48 * MIB):
        pytest.skip("needs Linux 5.14, which can find memory ahead")
    assert 40 * MIB < resident_bytes() - before < 60 * MIB
    assert tensor[:100].tolist() == list(range(100))


def test_no_more_memory_is_found_than_the_tensor_has() -> None:
    tensor = untouched(8 * MIB)
    before = resident_bytes()
    if not find_memory(tensor, num_bytes=2**40):
        pytest.skip("needs Linux 5.14, which can find memory ahead")
    assert resident_bytes() - before < 16 * MIB


def test_what_malloc_keeps_of_freed_memory_goes_back() -> None:
    pieces = [torch.ones(2**14) for _ in range(1600)]  # too small to be mapped one by one
    kept = pieces[::64]
    del pieces
    before = resident_bytes()
    if not release_free_memory():
        pytest.skip("needs glibc, which keeps what is freed between pieces in use")
    assert before - resident_bytes() > 50 * MIB
    assert all(bool((piece == 1).all()) for piece in kept)


def test_rows_take_memory_again_only_when_no_view_of_the_tensor_before_is_left() -> None:
    first = empty_rows((1024, 600), torch.bfloat16)
    start = first.data_ptr()
    view = first[1:].fill_(1.0)
    del first
    other = empty_rows((1024, 600), torch.bfloat16).fill_(2.0)
    assert other.data_ptr() != start and view.eq(1.0).all()
    del view
    assert empty_rows((1000, 600), torch.bfloat16).data_ptr() == start
    assert other.eq(2.0).all()


def test_rows_start_on_a_cache_line_in_their_shape_and_dtype() -> None:
    for rows in (1, 300, 3000):
        tensor = empty_rows((rows, 3, 64), torch.float32)
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
        assert tensor.shape == (rows, 3, 64) and tensor.dtype == torch.float32


def test_larger_rows_take_the_place_of_memory_that_is_too_small() -> None:
    for size in range(1, 40):
        empty_rows((size << 20,), torch.uint8).fill_(1)
    before = resident_bytes()
    tensors = [empty_rows((8 << 20,), torch.uint8).fill_(1) for _ in range(2)]
    assert resident_bytes() - before < 48 * MIB and len({one.data_ptr() for one in tensors}) == 2
