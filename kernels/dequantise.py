"""Quantised weights, as GGUF stores them, to float32 or bfloat16: products and sums in float32, rounded once at the end.

Blocks of 32 weights q with a float16 scale d each: Q4_0 `d (q - 8)`, Q4_1 `d q + m` with a float16 m, Q8_0 `d q`. All other kinds are
the `gguf` package's alone. Bound: writing the result once; the package passes over it some ten times.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from batchllm.kernels.native import library

_NATIVE_KINDS = {GGMLQuantizationType.Q4_0: 0, GGMLQuantizationType.Q4_1: 1, GGMLQuantizationType.Q8_0: 2}
_DATA_TYPES = {torch.float32: 0, torch.bfloat16: 1}


def dequantise_reference(stored: np.ndarray, kind: GGMLQuantizationType, out: torch.Tensor) -> None:
    """Fills `out` [num_rows, size] from `stored` uint8 [num_rows, row_bytes]. Raises NotImplementedError for an unknown kind."""
    out.copy_(torch.from_numpy(np.ascontiguousarray(dequantize(stored, kind), np.float32)))


def dequantise(stored: np.ndarray, kind: GGMLQuantizationType, out: torch.Tensor) -> None:
    """The same numbers, in one pass where the native library has the kind. Other Python threads run meanwhile."""
    native = library.load() if kind in _NATIVE_KINDS and out.dtype in _DATA_TYPES else None
    if native is None or isinstance(native, str):
        dequantise_reference(stored, kind, out)
        return
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if stored.nbytes * block_size != out.numel() * block_bytes:
        raise ValueError(f"{stored.nbytes} bytes of {kind.name} are not {out.numel()} weights")
    if not (out.is_contiguous() and stored.flags.c_contiguous):
        raise ValueError("blocks and weights must be contiguous")
    native.dequantise(
        stored.ctypes.data, out.data_ptr(), stored.nbytes // block_bytes, _NATIVE_KINDS[kind], _DATA_TYPES[out.dtype]
    )
