"""8-bit floats of the kind e4m3 (sign, 4 exponent bits, 3 mantissa bits; largest 448; no infinity) for Triton kernels.

Devices from 8.9 on convert them in hardware. For those below, Triton knows no such type: the bytes come as uint8 and
are converted here by moving bits, exactly, subnormals included. (NaN, which `encode_e4m3` never writes, decodes as
480.)
"""

from __future__ import annotations

import torch

from batchllm.kernels import tuning
from batchllm.kernels.launch import is_interpreted, jit, tl, triton

E4M3_MAX = 448.0

FP8_DTYPE = torch.float8_e4m3fn

_INTERPRETED = None if triton is None else tl.constexpr(is_interpreted())


@jit()
def product(left: tl.tensor, right: tl.tensor, total: tl.tensor) -> tl.tensor:
    """`total` + left @ right in float32, float32 operands in full. The interpreter would multiply bfloat16 by its bit
    patterns."""
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    else:
        return tl.dot(left, right, total, input_precision="ieee")


@jit()
def widen(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """A stored tile as `dtype`; uint8 holds e4m3 bytes. Exact for fp8 and int8 into float16, bfloat16 and float32."""
    if values.dtype == tl.uint8:
        bits = values.to(tl.uint16)
        # e4m3 moved to the place of float16's fields is 2**-8 times the value, for the exponent biases are 7 and 15.
        moved = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (moved * 256.0).to(dtype)
    elif values.dtype == tl.int8:
        return values.to(tl.float32).to(dtype)
    else:
        return values.to(dtype)


@jit()
def encode_e4m3(values: tl.tensor) -> tl.tensor:
    """float32 -> the bytes of the nearest e4m3, ties to even; beyond +-448 saturates, as a stored NaN would poison its
    whole row."""
    magnitude = tl.minimum(tl.abs(values), 448.0)
    # 2**-120 aligns the exponent biases 127 and 7; then the mantissa is rounded from 23 bits to 3 in integers.
    bits = (magnitude * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (rounded | sign).to(tl.uint8)


def as_kernel_operand(values: torch.Tensor) -> torch.Tensor:
    """`values` as a kernel loads it: e4m3 as bytes where Triton lacks the type, all else unchanged. Shares memory."""
    if values.dtype != FP8_DTYPE:
        return values
    return values if tuning.describe_device(values.device).has_e4m3 else values.view(torch.uint8)


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """e4m3 as bytes, all else unchanged: for kernels that write or move values without computing. Shares memory."""
    return values.view(torch.uint8) if values.dtype == FP8_DTYPE else values
