"""Triton where it can run: its language, its decorator, and the one way in which a kernel is launched.

Kernel files take `jit` and `tl` from here, so that their references import on a machine without Triton. Where no device here could run a
kernel it is not imported either, which would take a quarter of a second; who imports it first, to compile for another machine, gets it.
Triton 3.6 or newer. The interpreter of 3.6 needs numpy below 2.4, that of 3.9 does not; compiled kernels do not mind.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

triton: Any = None
tl: Any = None
if sys.modules.get("triton") is not None or os.environ.get("TRITON_INTERPRET") or torch.cuda.is_available():
    try:
        import triton  # type: ignore[no-redef]
        import triton.language as tl  # type: ignore[no-redef]
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        triton = tl = None


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit(**options)`; where Triton is not imported the function stays as it is and no launcher can reach it."""

    def decorate(function: Callable[..., Any]) -> Any:
        return function if triton is None else triton.jit(function, **options)

    return decorate


def is_installed() -> bool:
    """True where Triton could be imported, whether or not it was."""
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """True where Triton runs its kernels in its interpreter (TRITON_INTERPRET=1 when it was imported)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def can_run(device: torch.device) -> bool:
    """True where Triton kernels run on tensors of `device`."""
    return triton is not None and (is_interpreted() or device.type == "cuda")


def compiler_options(options: Mapping[str, int]) -> dict[str, int]:
    """What a kernel is compiled with. Products and sums are fused only where a kernel says so: its bits must not hang
    on a choice
    that the compiler may make one way in one specialisation and another way in the next."""
    return {**options, "enable_fp_fusion": False}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    device: torch.device,
    arguments: Mapping[str, Any],
    options: Mapping[str, int],
) -> None:
    """Enqueues `kernel` on the current stream of `device`. `options`: num_warps and num_stages of the tuning table.

    An empty grid is no launch. Raises RuntimeError where Triton cannot run on `device`.
    """
    if not can_run(device):
        reason = "is not installed" if not is_installed() else f"runs on CUDA devices, not on {device}"
        raise RuntimeError(f"Triton {reason}; TRITON_INTERPRET=1 runs an installed Triton anywhere, slowly")
    if 0 in grid:
        return
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](**arguments, **compiler_options(options))


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, which is positive."""
    return 1 << (value - 1).bit_length()
