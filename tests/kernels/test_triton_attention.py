"""Triton attention over work items against dense float64 attention, and the bits of its rows against themselves."""

from __future__ import annotations

import dataclasses

import attention_cases as cases
import pytest
import torch
from attention_cases import AttentionShape
from kernel_cases import error_share

from batchllm.kernels import attention, attention_triton
from batchllm.kernels.attention import CHUNK, HeadShape
from batchllm.kernels.floats import FP8_DTYPE

pytestmark = pytest.mark.triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYER = 1


def run(inputs: cases.AttentionInputs) -> torch.Tensor:
    scale = inputs.shape.head_dim**-0.5
    return attention_triton.attention_triton(
        inputs.query, inputs.kv, layer=LAYER, plan=inputs.plan, scale=scale, kv_scale=inputs.kv_scale
    )


def with_layout(inputs: cases.AttentionInputs, shape: AttentionShape) -> cases.AttentionInputs:
    """The same rows and pool under another plan."""
    plan = cases.attention_plan(shape, table=inputs.plan.block_table.cpu(), device=DEVICE)
    return dataclasses.replace(inputs, shape=shape, plan=plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dimension_is_within_tolerance(head_dim: int, dtype: torch.dtype) -> None:
    shape = AttentionShape((300, 37, 1), (1, 5, 1), num_heads=6, num_kv_heads=2, head_dim=head_dim, layout="split")
    assert cases.attention_share(shape, dtype=dtype, device=DEVICE) <= 1


@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (4, 4), (9, 3), (7, 1), (32, 2)])
def test_every_ratio_of_heads_is_within_tolerance(num_heads: int, num_kv_heads: int) -> None:
    shape = AttentionShape((257, 19), (3, 19), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64)
    assert cases.attention_share(shape, dtype=torch.float32, device=DEVICE) <= 1


@pytest.mark.parametrize("layout", ["private", "split", "shared"])
@pytest.mark.parametrize("block_size", [1, 16, 32, 48])
def test_every_layout_and_block_size_is_within_tolerance(block_size: int, layout: str) -> None:
    if layout == "shared" and CHUNK % block_size:
        pytest.skip("a shared prefix ends at a block")
    shared = CHUNK if layout == "shared" else 0
    shape = AttentionShape(
        (530, 256, 257), (20, 1, 1), 2, 1, head_dim=64, block_size=block_size, layout=layout, shared_length=shared
    )
    if layout == "shared":
        shape = dataclasses.replace(shape, kv_lengths=(530, 300, 257))
    assert cases.attention_share(shape, dtype=torch.float32, device=DEVICE) <= 1


@pytest.mark.parametrize("kv_length", [1, 2, 63, 64, 65, 250, 255, 256, 257, 511, 512, 513])
def test_spans_of_any_length_are_within_tolerance(kv_length: int) -> None:
    shape = AttentionShape((kv_length,), (1,), num_heads=2, num_kv_heads=1, head_dim=64)
    assert cases.attention_share(shape, dtype=torch.float32, device=DEVICE) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_eight_bit_kv_is_as_exact_as_its_stored_values(head_dim: int, dtype: torch.dtype) -> None:
    shape = AttentionShape((600, 40), (2, 3), num_heads=4, num_kv_heads=2, head_dim=head_dim, layout="split")
    assert cases.attention_share(shape, dtype=dtype, device=DEVICE, kv_dtype=FP8_DTYPE) <= 1


def test_eight_bit_kv_that_comes_as_bytes_gives_the_same_bits() -> None:
    shape = AttentionShape((300, 40), (2, 3), num_heads=4, num_kv_heads=2, head_dim=64)
    inputs = cases.attention_inputs(shape, dtype=torch.bfloat16, device=DEVICE, kv_dtype=FP8_DTYPE)
    # Stored NaN decodes to a number there; it is masked all the same.
    as_bytes = dataclasses.replace(inputs, kv=inputs.kv.view(torch.uint8))
    assert torch.equal(run(as_bytes), run(inputs))


def test_rows_in_no_item_come_back_as_zeros() -> None:
    shape = AttentionShape((40, 41), (2, 3), num_heads=2, num_kv_heads=1, head_dim=64)
    inputs = cases.attention_inputs(shape, dtype=torch.float32, device=DEVICE)
    plan = dataclasses.replace(inputs.plan, items=inputs.plan.items[1:].contiguous())
    out = run(dataclasses.replace(inputs, plan=plan))
    assert not out[:2].any()
    assert torch.equal(out[2:], run(inputs)[2:])


def test_a_padded_plan_changes_nothing() -> None:
    shape = AttentionShape((300, 530), (1, 2), num_heads=2, num_kv_heads=1, head_dim=64, layout="split")
    inputs = cases.attention_inputs(shape, dtype=torch.float32, device=DEVICE)
    plan = inputs.plan
    empty_items = torch.zeros(3, 6, dtype=torch.int32, device=DEVICE)
    padded = dataclasses.replace(
        plan,
        items=torch.cat([empty_items[:1], plan.items[:2], empty_items, plan.items[2:], empty_items]),
        merge_rows=torch.cat([plan.merge_rows, torch.zeros_like(plan.merge_rows)]),
        merge_start=torch.cat([plan.merge_start, plan.merge_start[-1:].expand(plan.merge_rows.numel())]),
    )
    assert torch.equal(run(dataclasses.replace(inputs, plan=padded)), run(inputs))


def test_a_schedule_made_once_serves_every_layer() -> None:
    shape = AttentionShape((300, 530), (1, 2), num_heads=2, num_kv_heads=1, head_dim=64, layout="split")
    inputs = cases.attention_inputs(shape, dtype=torch.float32, device=DEVICE)
    plan = attention_triton.schedule_attention_triton(inputs.plan, HeadShape(2, 1, 64, torch.float32))
    scheduled = dataclasses.replace(inputs, plan=plan)
    assert torch.equal(run(scheduled), run(inputs))
    assert plan.schedule is not None and plan.schedule[:2].tolist() == [0, 0]
    assert torch.equal(run(scheduled), run(inputs))


def test_merge_is_the_reference_merge() -> None:
    shape = AttentionShape((300, 800), (1, 2), num_heads=3, num_kv_heads=1, head_dim=80, layout="split")
    plan = cases.attention_inputs(shape, dtype=torch.float32, device=DEVICE).plan
    generator = torch.Generator().manual_seed(0)
    accumulators = torch.randn(plan.num_partials, 3, 80, generator=generator).to(DEVICE)
    maxima = (5 * torch.randn(plan.num_partials, 3, generator=generator)).to(DEVICE)
    sums = (1 + torch.rand(plan.num_partials, 3, generator=generator)).to(DEVICE)
    expected, got = torch.zeros(2, 3, 3, 80, device=DEVICE)
    attention.merge(accumulators, maxima, sums, plan=plan, out=expected)
    # Its maxima count in powers of two.
    attention_triton.merge_triton(accumulators, maxima * 1.4426950408889634, sums, plan=plan, out=got)
    assert error_share(got, expected.cpu().double(), dtype=torch.float32) <= 1


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16)])
def test_a_row_has_the_same_bits_alone_batched_split_and_shared(head_dim: int, dtype: torch.dtype) -> None:
    shared = AttentionShape(
        (530, 300, 257, 780),
        (3, 1, 1, 6),
        num_heads=3,
        num_kv_heads=1,
        head_dim=head_dim,
        layout="shared",
        shared_length=CHUNK,
    )
    inputs = cases.attention_inputs(shared, dtype=dtype, device=DEVICE)
    expected = run(inputs)
    for layout in ("private", "split"):
        assert torch.equal(run(with_layout(inputs, dataclasses.replace(shared, layout=layout))), expected)
    # The last row of the longest sequence, alone in its batch.
    alone = AttentionShape((780,), (1,), num_heads=3, num_kv_heads=1, head_dim=head_dim)
    plan = cases.attention_plan(alone, table=inputs.plan.block_table[3:].cpu(), device=DEVICE)
    single = dataclasses.replace(inputs, shape=alone, query=inputs.query[-1:], plan=plan)
    assert torch.equal(run(single), expected[-1:])


@pytest.mark.parametrize("layout", ["private", "split"])
def test_a_chunked_prefill_has_the_bits_of_a_whole_one(layout: str) -> None:
    whole = AttentionShape((300,), (60,), num_heads=3, num_kv_heads=1, head_dim=64)
    inputs = cases.attention_inputs(whole, dtype=torch.float32, device=DEVICE)
    expected = run(inputs)
    for start, stop in ((240, 247), (247, 258), (258, 300)):
        piece = dataclasses.replace(whole, kv_lengths=(stop,), query_lengths=(stop - start,), layout=layout)
        part = dataclasses.replace(with_layout(inputs, piece), query=inputs.query[start - 240 : stop - 240])
        assert torch.equal(run(part), expected[start - 240 : stop - 240])


def test_a_head_dimension_without_a_configuration_is_refused_by_name() -> None:
    shape = AttentionShape((4,), (1,), num_heads=1, num_kv_heads=1, head_dim=48)
    inputs = cases.attention_inputs(shape, dtype=torch.float32, device=DEVICE)
    with pytest.raises(ValueError, match="no attention configuration for float/48"):
        run(inputs)
