"""The Triton kernels of every operation but attention and sampling against float64: odd sizes, both ends of each
dtype."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch

from batchllm.kernels import activation, linear, norm
from batchllm.kernels.floats import FP8_DTYPE, encode_e4m3, widen
from batchllm.kernels.launch import jit, launch, tl

pytestmark = pytest.mark.triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODEL_DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows, hidden_size", [(1, 1), (3, 63), (5, 576), (2, 1111)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm_is_within_tolerance(num_rows: int, hidden_size: int, dtype: torch.dtype, has_residual: bool) -> None:
    share = cases.rms_norm_share(num_rows, hidden_size, dtype=dtype, device=DEVICE, has_residual=has_residual)
    assert share <= 1


def test_rms_norm_refuses_rows_that_do_not_fit_in_registers() -> None:
    with pytest.raises(ValueError, match="16384 values on a GPU, not 16385"):
        norm.rms_norm_triton(torch.zeros(1, 16385, device=DEVICE), torch.ones(16385, device=DEVICE), eps=1e-5)


def test_rms_norm_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    x = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight = torch.ones(100, device=DEVICE)
    batch = norm.rms_norm_triton(x, weight, eps=1e-5)
    assert torch.equal(norm.rms_norm_triton(x[4:5], weight, eps=1e-5), batch[4:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows, size", [(1, 1), (3, 63), (4, 64), (2, 150)])
def test_silu_mul_is_within_tolerance(num_rows: int, size: int, dtype: torch.dtype) -> None:
    assert cases.silu_mul_share(num_rows, size, dtype=dtype, device=DEVICE) <= 1


def test_silu_mul_takes_a_step_without_rows() -> None:
    assert activation.silu_mul_triton(torch.empty(0, 8, device=DEVICE)).shape == (0, 4)


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (9, 3), (14, 2)])
def test_rope_writes_its_slots_and_nothing_else(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    share = cases.rope_write_kv_share(
        5, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE
    )
    assert share <= 1


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_rope_stores_scaled_keys_and_values_in_eight_bits(dtype: torch.dtype) -> None:
    share = cases.rope_write_kv_share(
        7, num_heads=3, num_kv_heads=3, head_dim=80, dtype=dtype, device=DEVICE, kv_dtype=FP8_DTYPE
    )
    assert share <= 1


@jit()
def _recode_kernel(source: tl.tensor, widened: tl.tensor, encoded: tl.tensor, SIZE: tl.constexpr) -> None:
    index = tl.arange(0, SIZE)
    values = widen(tl.load(source + index), tl.float32)
    tl.store(widened + index, values)
    tl.store(encoded + index, encode_e4m3(values))


def test_every_e4m3_value_survives_the_way_through_bits() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    # 0x7F and 0xFF are the NaNs, which nobody stores.
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8)
    widened = torch.empty(256, device=DEVICE)
    encoded = torch.empty(256, dtype=torch.uint8, device=DEVICE)
    arguments = {"source": codes.to(DEVICE), "widened": widened, "encoded": encoded, "SIZE": 256}
    launch(_recode_kernel, (1,), device=DEVICE, arguments=arguments, options={"num_warps": 4})
    assert torch.equal(widened.cpu(), codes.view(FP8_DTYPE).float())
    assert torch.equal(encoded.cpu(), codes)


@jit()
def _encode_kernel(source: tl.tensor, encoded: tl.tensor, SIZE: tl.constexpr) -> None:
    index = tl.arange(0, SIZE)
    tl.store(encoded + index, encode_e4m3(tl.load(source + index)))


def test_encoding_rounds_to_nearest_even_and_saturates() -> None:
    codes = torch.arange(0, 126, dtype=torch.uint8)
    values = codes.view(FP8_DTYPE).double()
    middles = ((values[:-1] + values[1:]) / 2).float()
    random = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 100
    source = torch.cat([middles, -middles, random, torch.tensor([500.0, -1e9, 448.0, 464.0, 0.0])])
    source = torch.cat([source, torch.zeros(512 - source.numel())])
    encoded = torch.empty(512, dtype=torch.uint8, device=DEVICE)
    arguments = {"source": source.to(DEVICE), "encoded": encoded, "SIZE": 512}
    launch(_encode_kernel, (1,), device=DEVICE, arguments=arguments, options={"num_warps": 4})
    expected = source.clamp(-448, 448).to(FP8_DTYPE)
    assert torch.equal(encoded.cpu().view(FP8_DTYPE).float(), expected.float())


@pytest.mark.parametrize("kind", ["plain", "int8", "fp8"])
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("num_rows, out_size, in_size", [(1, 1, 1), (5, 70, 100), (33, 64, 96)])
def test_linear_is_within_tolerance(num_rows: int, out_size: int, in_size: int, dtype: torch.dtype, kind: str) -> None:
    share = cases.linear_share(
        num_rows, out_size=out_size, in_size=in_size, kind=kind, dtype=dtype, device=DEVICE, has_bias=num_rows == 5
    )
    assert share <= 1


@pytest.mark.parametrize("kind", ["plain", "int8", "fp8"])
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_linear_adds_into_the_residual(dtype: torch.dtype, kind: str) -> None:
    assert cases.linear_add_share(5, out_size=70, in_size=100, kind=kind, dtype=dtype, device=DEVICE) <= 1


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_int8_products_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    packed = cases.packed_weight(70, 1100, kind="int8", dtype=dtype, device=DEVICE, has_bias=True)
    x = torch.randn(9, 1100, generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE)
    x[3] = 0
    assert torch.equal(linear.linear_logits_triton(x, packed), linear.linear_logits(x, packed))


@pytest.mark.parametrize("dtype", [torch.int8, FP8_DTYPE])
def test_quantised_weights_are_within_half_a_step_of_the_channel(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * torch.arange(6)[:, None]
    packed = linear.quantise_linear(weight, dtype=dtype)
    assert packed.scale is not None
    error = (packed.weight.float() * packed.scale[:, None] - weight).abs()
    half_step = packed.scale[:, None] / 2 if dtype == torch.int8 else weight.abs() / 16 + packed.scale[:, None] * 2**-10
    assert bool((error <= half_step * 1.001).all())


def test_a_weight_is_not_quantised_to_an_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="not to torch.int16"):
        linear.quantise_linear(torch.zeros(2, 2), dtype=torch.int16)


@pytest.mark.parametrize("kind", ["plain", "int8", "fp8"])
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("num_rows, out_size, in_size", [(1, 1, 1), (5, 170, 100), (17, 257, 64)])
def test_linear_argmax_finds_a_largest_logit(
    num_rows: int, out_size: int, in_size: int, dtype: torch.dtype, kind: str
) -> None:
    share = cases.linear_argmax_share(
        num_rows, out_size=out_size, in_size=in_size, kind=kind, dtype=dtype, device=DEVICE, has_bias=num_rows == 5
    )
    assert share <= 1


def test_linear_argmax_takes_the_lowest_index_among_equals() -> None:
    weight = torch.zeros(300, 32)
    weight[[40, 41, 130, 290]] = 1.0
    packed = linear.pack_linear(weight.to(DEVICE))
    chosen = linear.linear_argmax_triton(torch.ones(3, 32, device=DEVICE), packed)
    assert chosen.tolist() == [40, 40, 40]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8_DTYPE])
@pytest.mark.parametrize("num_blocks, block_shape", [(2, (1, 2, 1, 16, 64)), (7, (3, 2, 1, 4, 5))])
def test_blocks_move_whole_and_alone(num_blocks: int, block_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert cases.move_blocks_share(num_blocks, block_shape, dtype=dtype, device=DEVICE) == 0
