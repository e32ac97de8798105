"""Memory below large tensors."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from batchllm.kernels.native.memory import advise_huge_pages, find_memory

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
