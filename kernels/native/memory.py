"""Memory below large tensors: huge pages, and finding it ahead of the first write. A block pool is read in pieces of a few
kilobytes all over it: with small pages most of them miss the TLB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

_SMALLEST_BYTES = 4 * 2**20
_ARENA_BYTES = 64 * 2**20
_HUGE_PAGE_BYTES = 2 * 2**20
_LINE_BYTES = 64

_arena = torch.empty(0, dtype=torch.uint8)
"""What is left of the last arena."""
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; Python has no name for it."""
_PIECE_BYTES = 32 * 2**20


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Asks for huge pages below a CPU tensor that nothing was written to yet; returns whether the system agreed.

    Only advice: small tensors and systems without huge pages stay as they are.
    """
    num_bytes = tensor.untyped_storage().nbytes()
    if _MADV_HUGEPAGE is None or tensor.device.type != "cpu" or num_bytes < _SMALLEST_BYTES:
        return False
    start = tensor.untyped_storage().data_ptr()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    return _madvise(first, length, _MADV_HUGEPAGE)


def find_memory(tensor: torch.Tensor, *, num_bytes: int) -> bool:
    """Has the system find memory for the first `num_bytes` of a CPU tensor's storage, on all cores; returns whether it did.

    Otherwise it does so page by page as they are first written, which stops whoever writes: in a virtual machine for milliseconds a
    page. What the tensor holds does not change. A system that cannot do it leaves everything as it is.
    """
    start = tensor.untyped_storage().data_ptr()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = start + min(num_bytes, tensor.untyped_storage().nbytes())

    def find(at: int) -> bool:
        num_bytes = min(at + _PIECE_BYTES, stop) - at
        return _madvise(at, num_bytes // mmap.PAGESIZE * mmap.PAGESIZE, _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="memory") as threads:
        return all(threads.map(find, range(first, stop, _PIECE_BYTES)))


def release_free_memory() -> bool:
    """Gives the system back what was freed and malloc keeps; returns whether there was some. Takes a millisecond or two for each 100 MB.

    For after a phase whose pieces suit no later one. Does nothing where malloc is not glibc's.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def _madvise(address: int, num_bytes: int, advice: int) -> bool:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return bool(madvise(address, num_bytes, advice) == 0)


def empty_in_huge_pages(num_bytes: int) -> torch.Tensor:
    """Bytes without values, uint8. As many as a huge page or more begin with one, where the system has them."""
    if num_bytes < _HUGE_PAGE_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    whole = torch.empty(num_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    advise_huge_pages(whole)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def empty_in_arena(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values, for weights: the small ones lie together, so that huge pages are below them too.

    It starts on a cache line. An arena is freed with the last tensor in it.
    """
    global _arena
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    taken = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
    if taken > _arena.numel():
        _arena = empty_in_huge_pages(max(_ARENA_BYTES, taken))
    piece, _arena = _arena[:num_bytes], _arena[taken:]
    return piece.view(dtype).view(shape)
