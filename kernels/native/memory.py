"""Huge pages for large tensors. A block pool is read in pieces of a few kilobytes all over it: with small pages most of
them miss the TLB.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_SMALLEST_BYTES = 4 * 2**20
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)


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
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return bool(madvise(first, length, _MADV_HUGEPAGE) == 0)
