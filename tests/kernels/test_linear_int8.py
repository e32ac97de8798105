"""Products over int8 weights: whole numbers in between, so every path has the reference's bits, and a row its own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from batchllm import ops
from batchllm.kernels import linear, rope

SHAPES = [(1, 3), (7, 40), (17, 64), (70, 100), (100, 1100), (960, 576), (48, 2500)]
"""Outputs and inputs: whole tiles and not, and more inputs than float32 sums exactly."""


@pytest.fixture
def kernels(reference_or_native: ops.Kernels) -> ops.Kernels:
    return reference_or_native


def make_rows(num_rows: int, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, one of them zeros where there are several."""
    rows = torch.randn(num_rows, in_size) * torch.logspace(-3, 3, num_rows)[:, None]
    if num_rows > 2:
        rows[1] = 0
    return rows.to(dtype)


def make_weight(out_size: int, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(out_size, in_size) / math.sqrt(in_size)).to(dtype)


def rounded_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product of rounded rows and weights in float64."""
    rows, row_scale = linear.quantise_rows(x)
    channels, scale = linear.quantise_weight(weight, dtype=torch.int8)
    y = (rows.double() * row_scale.double()[:, None]) @ (channels.double() * scale.double()[:, None]).T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 33, 70])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_every_path_has_the_bits_of_the_reference(native, dtype, out_size, in_size, num_rows):
    x, weight = make_rows(num_rows, in_size, dtype), make_weight(out_size, in_size, dtype)
    bias = torch.randn(out_size).to(dtype)
    reference, packed = linear.pack_linear(weight, bias, int8=True), native.pack_linear(weight, bias, int8=True)
    assert torch.equal(native.linear_logits(x, packed), linear.linear_logits(x, reference))
    assert torch.equal(native.linear(x, packed), linear.linear(x, reference))
    assert torch.equal(native.linear_argmax(x, packed), linear.linear_argmax(x, reference))


@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_the_product_is_that_of_rounded_rows_and_weights(kernels, dtype, assert_near, out_size, in_size):
    x, weight = torch.randn(5, in_size).to(dtype), make_weight(out_size, in_size, dtype)
    bias = torch.randn(out_size).to(dtype)
    y = kernels.linear(x, kernels.pack_linear(weight, bias, int8=True))
    assert y.dtype == dtype
    assert_near(y, rounded_product(x, weight, bias))


def test_rounding_moves_a_product_by_about_a_hundredth(kernels):
    x, weight = torch.randn(64, 512), make_weight(256, 512, torch.float32)
    error = kernels.linear(x, kernels.pack_linear(weight, int8=True)) - x @ weight.T
    assert 0.002 < float(error.square().mean().sqrt()) < 0.015


def test_a_row_has_the_same_bits_whatever_the_number_of_rows(kernels, dtype):
    x, packed = make_rows(300, 576, dtype), kernels.pack_linear(make_weight(100, 576, dtype), int8=True)
    whole = kernels.linear(x, packed)
    for start, stop in [(0, 1), (299, 300), (5, 37), (100, 116), (20, 53), (64, 192)]:
        assert torch.equal(kernels.linear(x[start:stop].contiguous(), packed), whole[start:stop])


def test_rows_of_any_stride_are_taken(kernels, dtype):
    wide, packed = make_rows(20, 200, dtype), kernels.pack_linear(make_weight(30, 90, dtype), int8=True)
    assert torch.equal(kernels.linear(wide[:, 7:97], packed), kernels.linear(wide[:, 7:97].contiguous(), packed))


def test_no_rows_give_no_rows(kernels, dtype):
    packed = kernels.pack_linear(make_weight(24, 40, dtype), int8=True)
    assert kernels.linear(torch.randn(0, 40).to(dtype), packed).shape == (0, 24)


def test_the_lowest_index_wins_among_equals(kernels, dtype):
    weight = torch.zeros(300, 8).to(dtype)
    weight[[40, 41, 250]] = 1
    x = torch.tensor([[1.0] * 8, [0.0] * 8, [-1.0] * 8]).to(dtype)
    assert kernels.linear_argmax(x, kernels.pack_linear(weight, int8=True)).tolist() == [40, 0, 0]


@pytest.mark.parametrize("num_rows", [1, 16, 33])
def test_the_product_is_added_in_place(kernels, dtype, assert_near, num_rows):
    x, weight = torch.randn(num_rows, 70).to(dtype), make_weight(100, 70, dtype)
    residual, bias = torch.randn(num_rows, 100).to(dtype), torch.randn(100).to(dtype)
    truth = residual.double() + rounded_product(x, weight, bias)
    kernels.linear_add(x, kernels.pack_linear(weight, bias, int8=True), residual)
    assert_near(residual / 4, truth / 4)


@pytest.mark.parametrize("size", [16, 48, 50])
def test_the_halves_of_the_product_are_gated(kernels, dtype, assert_near, size):
    x, weight = torch.randn(33, 70).to(dtype), make_weight(2 * size, 70, dtype)
    bias = torch.randn(2 * size).to(dtype)
    gate, up = rounded_product(x, weight, bias).chunk(2, dim=-1)
    result = kernels.linear_silu_mul(x, kernels.pack_linear_gated(weight, bias, int8=True))
    assert_near(result / 4, gate * gate.sigmoid() * up / 4)


@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_the_product_is_turned_and_written_to_the_pool(kernels, dtype, assert_near, head_dim):
    num_rows, num_heads, num_kv_heads = 35, 3, 1
    x, weight = torch.randn(num_rows, 64).to(dtype), make_weight(5 * head_dim, 64, dtype)
    cos_sin = torch.randn(50, head_dim).sin()
    arguments = {
        "layer": 1,
        "positions": torch.randint(50, (num_rows,)).int(),
        "slots": torch.randperm(50)[:num_rows],
        "num_heads": num_heads,
    }
    pools = [
        torch.full((10, 2, 2, num_kv_heads, 5, head_dim), torch.nan, dtype=kind) for kind in (dtype, torch.float64)
    ]
    packed = kernels.pack_linear(weight, int8=True)
    query = kernels.linear_rope_write_kv(x, packed, cos_sin, pools[0], **arguments)
    truth = rope.rope_write_kv(rounded_product(x, weight), cos_sin.double(), pools[1], **arguments)
    assert_near(query / 4, truth / 4)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())
    assert_near(pools[0].nan_to_num() / 4, pools[1].nan_to_num() / 4)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_none_spoils_its_row_and_no_other(kernels, dtype, bad):
    x, packed = torch.randn(35, 100).to(dtype), kernels.pack_linear(make_weight(20, 100, dtype), int8=True)
    before = kernels.linear(x, packed)
    x[[2, 33], 71] = bad
    after = kernels.linear(x, packed)
    is_bad = torch.zeros(35, dtype=torch.bool)
    is_bad[[2, 33]] = True
    assert torch.equal(after.isnan().all(dim=1), is_bad)
    assert torch.equal(after[~is_bad], before[~is_bad])


def test_rows_of_denormal_numbers_become_zeros_and_no_infinities(kernels):
    packed = kernels.pack_linear(make_weight(20, 64, torch.float32), int8=True)
    assert kernels.linear(torch.full((3, 64), 1e-42), packed).tolist() == [[0.0] * 20] * 3


def test_rows_are_rounded_to_even_with_the_largest_at_127():
    rows, scale = linear.quantise_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5, -126.4]]))
    assert rows.tolist() == [[127, 0, 2, -2, -126]]
    assert scale.tolist() == [1.0]


def test_the_largest_sum_fits(kernels):
    in_size = linear.MAX_INT8_INPUTS
    x, weight = torch.ones(2, in_size), torch.ones(3, in_size)
    weight[1], weight[2, ::2] = -1.0, -1.0
    y = kernels.linear(x, kernels.pack_linear(weight, int8=True))
    torch.testing.assert_close(y, torch.tensor([[in_size, -in_size, 0.0]] * 2))


@pytest.mark.parametrize("pack", [linear.pack_linear, linear.pack_linear_gated])
def test_more_inputs_than_sums_have_room_for_are_refused(pack: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="at most 65536 inputs, not 65537"):
        pack(torch.ones(2, linear.MAX_INT8_INPUTS + 1), int8=True)
