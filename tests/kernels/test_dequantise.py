"""Quantised blocks to weights: bit for bit what the gguf package computes, on every path, for all bytes that a file may hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from batchllm.kernels import dequantise
from batchllm.kernels.native import library as native_library

KINDS = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]


@pytest.fixture(params=["portable", "avx2"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The two ways in which blocks are read."""
    library = native_library.load()
    if isinstance(library, str):
        pytest.skip(f"needs the native library: {library}")
    if request.param not in library.runnable_paths():
        pytest.skip(f"needs a processor with {request.param}")
    before = library.path_name()
    library.use_path(request.param)
    yield request.param
    library.use_path(before)


def stored_blocks(kind: GGMLQuantizationType, *, num_rows: int, blocks_a_row: int) -> np.ndarray:
    """Random bytes, with scales of every kind that is a number: zeros of both signs, subnormal, the largest."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    generator = np.random.default_rng(num_rows)
    blocks = generator.integers(0, 256, (num_rows * blocks_a_row, block_bytes), dtype=np.uint8)
    halves = generator.integers(0, 1 << 16, (len(blocks), 2), dtype=np.uint16)
    halves[(halves & 0x7C00) == 0x7C00] = 0x8000
    halves[:6, 0] = [0, 0x8000, 1, 0x83FF, 0x7BFF, 0xFBFF][: len(halves)]
    blocks[:, :2] = halves[:, :1].view(np.uint8)
    if kind == GGMLQuantizationType.Q4_1:
        blocks[:, 2:4] = halves[:, 1:].copy().view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "blocks_a_row"), [(1, 1), (7, 3), (300, 18), (1, 10_001)])
def test_weights_are_those_of_the_package_bit_for_bit(
    path: str, kind: GGMLQuantizationType, dtype: torch.dtype, num_rows: int, blocks_a_row: int
) -> None:
    stored = stored_blocks(kind, num_rows=num_rows, blocks_a_row=blocks_a_row)
    room = torch.full((num_rows * blocks_a_row * 32 + 64,), 7, dtype=dtype)
    out = room[32:-32].view(num_rows, -1)
    expected = torch.empty_like(out)
    dequantise.dequantise(stored, kind, out)
    dequantise.dequantise_reference(stored, kind, expected)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out.view(bits), expected.view(bits))
    assert (room[:32] == 7).all() and (room[-32:] == 7).all()


def test_a_scale_that_is_no_number_gives_no_number(path: str) -> None:
    stored = stored_blocks(GGMLQuantizationType.Q8_0, num_rows=3, blocks_a_row=1)
    stored[:, :2] = np.array([[0x7E00], [0x7C00], [0xFC00]], np.uint16).view(np.uint8)
    stored[:, 2:] = 1
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(3, 32, dtype=dtype)
        dequantise.dequantise(stored, GGMLQuantizationType.Q8_0, out)
        assert out[0].isnan().all() and out[1].isposinf().all() and out[2].isneginf().all()


def test_blocks_that_do_not_fit_the_weights_are_refused(path: str) -> None:
    stored = stored_blocks(GGMLQuantizationType.Q8_0, num_rows=2, blocks_a_row=2)
    with pytest.raises(ValueError, match="136 bytes of Q8_0 are not 96 weights"):
        dequantise.dequantise(stored, GGMLQuantizationType.Q8_0, torch.empty(2, 48))
    with pytest.raises(ValueError, match="contiguous"):
        dequantise.dequantise(stored, GGMLQuantizationType.Q8_0, torch.empty(64, 2).t())


def test_a_kind_without_native_code_is_read_by_the_package() -> None:
    values = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float16)
    out = torch.empty(2, 40, dtype=torch.bfloat16)
    dequantise.dequantise(values.view(np.uint8), GGMLQuantizationType.F16, out)
    assert torch.equal(out, torch.from_numpy(values).float().bfloat16())
