"""Every operation on every backend against float64, and the promise that a row's bits are its own."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from batchllm.kernels import rope
from batchllm.kernels.attention import CHUNK
from batchllm.kernels.between_attention import KvTarget, LayerEnd, LayerStart
from batchllm.kernels.floats import FP8_DTYPE

SPANS = [(1, 1), (17, 17), (256, 1), (257, 3), (300, 300), (700, 30), (1029, 1)]
FEW_SPANS = [(1, 1), (17, 17), (256, 1), (257, 3), (290, 20), (529, 1)]
"""For Triton, whose interpreter takes milliseconds for a row."""
HEAD_DIMS = [64, 80, 96, 128, 256]


def run_attention(kernels, case, plan, rows=slice(None)):
    return kernels.attention(case.query[rows].contiguous(), case.kv, layer=case.layer, plan=plan, scale=case.scale)


def test_attention_is_softmax_of_visible_positions(kernels, dtype, make_attention_case, assert_near):
    case = make_attention_case(FEW_SPANS if kernels.name == "triton" else SPANS, dtype=dtype)
    assert_near(run_attention(kernels, case, case.private_plan()), case.truth())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_takes_every_head_dim(kernels, dtype, make_attention_case, assert_near, head_dim):
    case = make_attention_case([(1, 1), (39, 5), (530, 2)], dtype=dtype, head_dim=head_dim, num_heads=3, num_kv_heads=1)
    assert_near(run_attention(kernels, case, case.split_plan()), case.truth())


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_attention_takes_every_ratio_of_query_to_kv_heads(kernels, dtype, make_attention_case, assert_near, group):
    case = make_attention_case([(270, 9), (33, 1)], dtype=dtype, num_heads=2 * group, num_kv_heads=2)
    assert_near(run_attention(kernels, case, case.private_plan()), case.truth())


@pytest.mark.parametrize("block_size", [1, 5, 16, 17, 32, 256])
def test_attention_takes_every_block_size(kernels, dtype, make_attention_case, assert_near, block_size):
    case = make_attention_case([(300, 20), (4, 1), (529, 1)], dtype=dtype, block_size=block_size, padded_blocks=False)
    assert_near(run_attention(kernels, case, case.private_plan()), case.truth())


@pytest.mark.parametrize("num_sequences", [2, 9])
def test_attention_over_a_shared_prefix_reads_it_for_every_row(
    kernels, dtype, make_attention_case, assert_near, num_sequences
):
    spans = [(2 * CHUNK + 1 + 37 * i % 400, 1 + i % 3 if i else 1) for i in range(num_sequences)]
    spans = [(max(length, 2 * CHUNK + rows), rows) for length, rows in spans]
    case = make_attention_case(spans, dtype=dtype, shared=2 * CHUNK)
    assert_near(run_attention(kernels, case, case.shared_plan()), case.truth())


# Two to many rows: one tile of columns, two, and several units; fronts of some steps and, within a step, of none; short and long rests.
FORKS = [
    (32, [(33, 1), (64, 1)]),
    (16, [(17, 1), (40, 1), (256, 1)]),
    (192, [(193 + 9 * i, 1) for i in range(6)]),
    (CHUNK + 80, [(CHUNK + 81 + 5 * i, 1 + i % 3 // 2) for i in range(12)]),
    (CHUNK + 224, [(CHUNK + 230 + 70 * i, 1 + i // 6) for i in range(9)]),
]


@pytest.mark.parametrize(("front", "spans"), [*FORKS[:3], (FORKS[3][0], FORKS[3][1][:5])])
def test_attention_of_rows_that_share_the_front_of_a_chunk_has_the_bits_of_each_alone(
    kernels, dtype, make_attention_case, assert_near, front, spans
):
    case = make_attention_case(spans, dtype=dtype, shared=front)
    forked = run_attention(kernels, case, case.forked_plan())
    assert_near(forked, case.truth())
    assert torch.equal(forked, run_attention(kernels, case, case.private_plan()))


# Tiles of columns are what native kernels count in.
@pytest.mark.parametrize(
    ("front", "spans", "group"),
    [(*FORKS[3], 3), (*FORKS[4], 3), *((*FORKS[3], group) for group in (1, 2, 4, 5, 16, 20))],
)
def test_any_number_of_heads_and_rows_that_share_a_front_have_the_bits_of_each_alone(
    reference_or_native, dtype, make_attention_case, assert_is_near, front, spans, group
):
    case = make_attention_case(spans, dtype=dtype, num_heads=2 * group, num_kv_heads=2, shared=front)
    forked = run_attention(reference_or_native, case, case.forked_plan())
    assert_is_near(forked, case.truth())
    assert torch.equal(forked, run_attention(reference_or_native, case, case.private_plan()))


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(64, 1), (64, 5), (64, 32), (80, 16), (96, 16), (128, 5), (256, 16)]
)
def test_rows_that_share_a_front_have_their_own_bits_with_any_head_dim_and_block_size(
    kernels, dtype, make_attention_case, head_dim, block_size
):
    case = make_attention_case(
        [(161 + 19 * i, 1 + i // 4) for i in range(6)],
        dtype=dtype,
        num_heads=3,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        shared=160,
    )
    forked = run_attention(kernels, case, case.forked_plan())
    assert torch.equal(forked, run_attention(kernels, case, case.private_plan()))


@pytest.mark.parametrize("group", [32, 33, 64])
def test_rows_of_more_heads_than_a_unit_takes_share_a_front_all_the_same(
    native, dtype, make_attention_case, assert_is_near, group
):
    case = make_attention_case([(60, 1), (70, 1), (90, 2)], dtype=dtype, num_heads=group, num_kv_heads=1, shared=48)
    forked = run_attention(native, case, case.forked_plan())
    assert_is_near(forked, case.truth())
    assert torch.equal(forked, run_attention(native, case, case.private_plan()))


def test_attention_of_large_scores_stays_among_the_values(kernels, dtype, make_attention_case):
    # Scores in the thousands: their own rounding decides between near equals, so the truth is only that the result is a
    # mean of values.
    case = make_attention_case([(600, 40)], dtype=dtype)
    case.query.mul_(1000)
    out = run_attention(kernels, case, case.private_plan())
    assert float(out.abs().max()) <= float(case.kv[case.kv.isfinite()].abs().max()) * 1.01


@pytest.mark.parametrize("position", [10, 290])
def test_attention_that_sees_what_is_not_a_number_is_none(kernels, dtype, make_attention_case, position):
    case = make_attention_case([(300, 20)], dtype=dtype)
    case.kv[case.block_table[0, position // 16], case.layer, 0, :, position % 16] = torch.nan
    out = run_attention(kernels, case, case.private_plan())
    first_row = max(position - 280, 0)
    assert out[:first_row].isfinite().all()
    assert out[first_row:].isnan().all()


def test_attention_rows_in_no_item_are_zero(kernels, dtype, make_attention_case):
    case = make_attention_case([(20, 4), (20, 4)], dtype=dtype)
    plan = case.private_plan()
    plan.items[0, 1] = 2
    assert not run_attention(kernels, case, plan)[2:4].any()


def test_attention_of_no_items_is_zero(kernels, dtype, make_attention_case):
    case = make_attention_case([(20, 4)], dtype=dtype)
    plan = case._plan([], {})
    assert not run_attention(kernels, case, plan).any()


def test_an_attention_row_has_the_same_bits_however_it_is_planned(kernels, dtype, make_attention_case):
    spans = [(CHUNK + 1 + 91 * i, 1 + 13 * i) for i in range(3)]
    spans = [(max(length, CHUNK + rows), rows) for length, rows in spans]
    case = make_attention_case(spans, dtype=dtype, num_heads=2, num_kv_heads=1, shared=CHUNK)
    together = run_attention(kernels, case, case.private_plan())
    assert together.isfinite().all()
    assert torch.equal(together, run_attention(kernels, case, case.shared_plan()))
    assert torch.equal(together, run_attention(kernels, case, case.split_plan()))


def test_an_attention_row_has_the_same_bits_alone_and_in_a_batch(kernels, dtype, make_attention_case):
    case = make_attention_case([(400, 33), (90, 90), (1, 1), (513, 1)], dtype=dtype, num_heads=3, num_kv_heads=1)
    plan = case.private_plan()
    together = run_attention(kernels, case, plan)
    for row, table, position in [(0, 0, 367), (32, 0, 399), (33, 1, 0), (70, 1, 37), (123, 2, 0), (124, 3, 512)]:
        alone = case._plan([(0, 1, 0, position + 1, position + 1, -1)], {})
        alone.positions[0], alone.tables[0] = position, table
        assert torch.equal(run_attention(kernels, case, alone, slice(row, row + 1))[0], together[row]), row


@pytest.mark.parametrize("piece", [1, 7, 300])
def test_a_prompt_cut_into_pieces_has_the_bits_of_the_whole(kernels, dtype, make_attention_case, piece):
    length = 270 if kernels.name == "triton" else 530
    case = make_attention_case([(length, length)], dtype=dtype, num_heads=1, num_kv_heads=1)
    whole = run_attention(kernels, case, case.private_plan())
    # Small pieces around the chunk's border are enough.
    for start in range(252, 260, piece) if piece < 64 else range(0, length, min(piece, length // 2 + 1)):
        stop = min(start + piece, length)
        plan = case._plan([(0, stop - start, 0, stop, stop, -1)], {})
        plan.positions[: stop - start] = torch.arange(start, stop, dtype=torch.int32)
        assert torch.equal(run_attention(kernels, case, plan, slice(start, stop)), whole[start:stop])


@pytest.mark.parametrize("num_rows", [1, 16, 33])
def test_linear_add_adds_the_product_in_place(kernels, dtype, assert_near, num_rows):
    x, weight = torch.randn(num_rows, 70).to(dtype), (torch.randn(100, 70) / 8).to(dtype)
    residual, bias = torch.randn(num_rows, 100).to(dtype), torch.randn(100).to(dtype)
    truth = residual.double() + x.double() @ weight.double().T + bias.double()
    kernels.linear_add(x, kernels.pack_linear(weight, bias), residual)
    assert_near(residual / 4, truth / 4)


@pytest.mark.parametrize("num_rows", [1, 16, 33])
@pytest.mark.parametrize("size", [16, 48, 50, 96])
def test_linear_silu_mul_gates_the_two_halves_of_the_product(kernels, dtype, assert_near, size, num_rows):
    x, weight = torch.randn(num_rows, 70).to(dtype), (torch.randn(2 * size, 70) / 8).to(dtype)
    bias = torch.randn(2 * size).to(dtype)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=-1)
    result = kernels.linear_silu_mul(x, kernels.pack_linear_gated(weight, bias))
    assert_near(result / 4, gate * gate.sigmoid() * up / 4)


@dataclasses.dataclass(frozen=True)
class BetweenCase:
    """Weights of a layer's end and the next one's start, and rows between them. `heads`: of queries, of keys, numbers of each."""

    attended: torch.Tensor
    residual: torch.Tensor
    output: torch.Tensor
    norm: torch.Tensor
    gate_up: torch.Tensor
    bias: torch.Tensor
    down: torch.Tensor
    qkv: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    heads: tuple[int, int, int]

    @classmethod
    def make(cls, num_rows, *, size, gated_size, heads, dtype, kernels):
        if kernels.name == "triton":
            # A program takes a row or a tile of them, and in the interpreter some milliseconds: more rows would say no more.
            num_rows = min(num_rows, 20)

        def weight(out_size, in_size):
            return (torch.randn(out_size, in_size) / in_size**0.5).to(dtype)

        num_heads, num_kv_heads, head_dim = heads
        return cls(
            attended=torch.randn(num_rows, num_heads * head_dim).to(dtype),
            residual=torch.randn(num_rows, size).to(dtype),
            output=weight(size, num_heads * head_dim),
            norm=torch.rand(size).to(dtype),
            gate_up=weight(2 * gated_size, size),
            bias=torch.randn(2 * gated_size).to(dtype),
            down=weight(size, gated_size),
            qkv=weight((num_heads + 2 * num_kv_heads) * head_dim, size),
            cos_sin=torch.randn(1000, head_dim).sin(),
            positions=torch.randint(1000, (num_rows,)).int(),
            slots=torch.randperm(num_rows + 5)[:num_rows],
            heads=heads,
        )

    def pool(self, dtype):
        _, num_kv_heads, head_dim = self.heads
        return torch.full(
            (-(-(self.residual.shape[0] + 5) // 5), 2, 2, num_kv_heads, 5, head_dim), torch.nan, dtype=dtype
        )

    def end(self, kernels):
        return LayerEnd(
            output=kernels.pack_linear(self.output),
            norm=self.norm,
            gate_up=kernels.pack_linear_gated(self.gate_up, self.bias),
            down=kernels.pack_linear(self.down),
        )

    def start(self, kernels):
        return LayerStart(norm=self.norm, qkv=kernels.pack_linear(self.qkv))

    def target(self, kv, rows=slice(None)):
        return KvTarget(
            self.cos_sin, kv, 1, self.positions[rows].contiguous(), self.slots[rows].contiguous(), self.heads[0]
        )

    def normed_truth(self, wide):
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm.double()


BETWEEN_SHAPES = [(64, 512, (4, 2, 16)), (70, 48, (3, 1, 24)), (96, 50, (2, 1, 64))]


@pytest.mark.parametrize("num_rows", [1, 33, 340])
@pytest.mark.parametrize(("size", "gated_size", "heads"), BETWEEN_SHAPES)
def test_a_layer_ends_with_its_output_and_the_gated_product_of_the_normed_rows(
    kernels, dtype, assert_near, size, gated_size, heads, num_rows
):
    case = BetweenCase.make(num_rows, size=size, gated_size=gated_size, heads=heads, dtype=dtype, kernels=kernels)
    wide = case.residual.double() + case.attended.double() @ case.output.double().T
    gate, gated = (case.normed_truth(wide) @ case.gate_up.double().T + case.bias.double()).chunk(2, dim=-1)
    truth = wide + (gate * gate.sigmoid() * gated) @ case.down.double().T
    residual = case.residual.clone()
    assert kernels.between_attention(residual, eps=1e-5, attended=case.attended, end=case.end(kernels)) is None
    # Rounded once more on the way than a product is.
    assert_near(residual / 8, truth / 8)


@pytest.mark.parametrize("num_rows", [1, 33, 340])
@pytest.mark.parametrize(("size", "gated_size", "heads"), BETWEEN_SHAPES)
def test_a_layer_starts_with_turned_queries_and_keys_and_values_in_the_pool(
    kernels, dtype, assert_near, size, gated_size, heads, num_rows
):
    case = BetweenCase.make(num_rows, size=size, gated_size=gated_size, heads=heads, dtype=dtype, kernels=kernels)
    case.slots[len(case.slots) // 2] = -1
    pools = case.pool(dtype), case.pool(torch.float64)
    residual = case.residual.clone()
    query = kernels.between_attention(residual, eps=1e-5, start=case.start(kernels), target=case.target(pools[0]))
    product = case.normed_truth(case.residual.double()) @ case.qkv.double().T
    truth = rope.rope_write_kv(
        product,
        case.cos_sin.double(),
        pools[1],
        layer=1,
        positions=case.positions,
        slots=case.slots,
        num_heads=heads[0],
    )
    assert torch.equal(residual, case.residual)
    assert_near(query / 4, truth / 4)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())
    assert_near(pools[0].nan_to_num() / 4, pools[1].nan_to_num() / 4)


@pytest.mark.parametrize("num_rows", [33, 340])
@pytest.mark.parametrize(("size", "gated_size", "heads"), BETWEEN_SHAPES)
def test_an_end_and_a_start_together_have_the_bits_of_one_after_the_other(
    kernels, dtype, size, gated_size, heads, num_rows
):
    case = BetweenCase.make(num_rows, size=size, gated_size=gated_size, heads=heads, dtype=dtype, kernels=kernels)
    end, start, pools, residuals = case.end(kernels), case.start(kernels), [], []
    queries = []
    for is_one in (True, False):
        pools.append(case.pool(dtype))
        residuals.append(case.residual.clone())
        following = {"start": start, "target": case.target(pools[-1])}
        if is_one:
            query = kernels.between_attention(residuals[-1], eps=1e-5, attended=case.attended, end=end, **following)
        else:
            kernels.between_attention(residuals[-1], eps=1e-5, attended=case.attended, end=end)
            query = kernels.between_attention(residuals[-1], eps=1e-5, **following)
        queries.append(query)
    assert torch.equal(*queries)
    assert torch.equal(*residuals)
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


def test_a_row_between_attentions_has_the_same_bits_whatever_the_number_of_rows(native, dtype):
    case = BetweenCase.make(900, size=576, gated_size=512, heads=(4, 2, 64), dtype=dtype, kernels=native)
    end, start = case.end(native), case.start(native)

    def result(first, stop):
        rows, pool = slice(first, stop), case.pool(dtype)
        residual = case.residual[rows].clone()
        query = native.between_attention(
            residual,
            eps=1e-5,
            attended=case.attended[rows].clone(),
            end=end,
            start=start,
            target=case.target(pool, rows),
        )
        written = pool.transpose(1, 4).flatten(0, 1)[case.slots[rows]]
        return residual, query, written[:, :, :, 1]

    whole = result(0, 900)
    for first, stop in [(0, 1), (899, 900), (5, 37), (100, 116), (20, 320), (0, 640), (300, 900)]:
        for part, all_rows in zip(result(first, stop), whole, strict=True):
            assert part.isfinite().all()
            assert torch.equal(part, all_rows[first:stop])


@pytest.mark.parametrize("name", ["output", "down", "qkv"])
def test_weights_that_do_not_fit_between_attentions_are_refused(native, dtype, name):
    case = BetweenCase.make(3, size=64, gated_size=48, heads=(4, 2, 16), dtype=dtype, kernels=native)
    case = dataclasses.replace(case, **{name: torch.randn(80, 80).to(dtype)})
    following = {"start": case.start(native), "target": case.target(case.pool(dtype))}
    with pytest.raises(ValueError, match="residual must be|weight of 80 outputs"):
        native.between_attention(case.residual, eps=1e-5, attended=case.attended, end=case.end(native), **following)


@pytest.mark.parametrize("head_dim", [8, *HEAD_DIMS])
def test_linear_rope_write_kv_is_the_turned_product(kernels, dtype, assert_near, head_dim):
    num_rows, num_heads, num_kv_heads, in_size = 35, 3, 1, 64
    out_size = (num_heads + 2 * num_kv_heads) * head_dim
    x, weight = torch.randn(num_rows, in_size).to(dtype), (torch.randn(out_size, in_size) / 8).to(dtype)
    bias = torch.randn(out_size).to(dtype)
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
    query = kernels.linear_rope_write_kv(x, kernels.pack_linear(weight, bias), cos_sin, pools[0], **arguments)
    product = x.double() @ weight.double().T + bias.double()
    truth = rope.rope_write_kv(product, cos_sin.double(), pools[1], **arguments)
    assert_near(query / 4, truth / 4)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())
    assert_near(pools[0].nan_to_num() / 4, pools[1].nan_to_num() / 4)


@pytest.mark.parametrize(("out_size", "in_size"), [(100, 33), (960, 576), (48, 1536), (20, 3200)])
def test_a_linear_row_has_the_same_bits_whatever_the_number_of_rows(kernels, dtype, out_size, in_size):
    if kernels.name != "native":
        pytest.skip("torch's product, and the tiles on a GPU, change with the number of rows")
    x, weight = torch.randn(300, in_size).to(dtype), torch.randn(out_size, in_size).to(dtype)
    packed = kernels.pack_linear(weight)
    whole = kernels.linear(x, packed)
    for start, stop in [(0, 1), (299, 300), (5, 37), (100, 116), (20, 53), (64, 192)]:
        assert torch.equal(kernels.linear(x[start:stop].contiguous(), packed), whole[start:stop])


@pytest.mark.parametrize("size", [1, 15, 64, 576, 1000, 4096])
@pytest.mark.parametrize("num_rows", [1, 3, 33])
def test_rms_norm_divides_by_the_root_mean_square(kernels, dtype, assert_near, num_rows, size):
    x, weight = torch.randn(num_rows, size).to(dtype), torch.randn(size).to(dtype)
    wide = x.double()
    truth = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_near(kernels.rms_norm(x, weight, eps=1e-5), truth)


@pytest.mark.parametrize("size", [1, 15, 576, 1000])
def test_rms_norm_adds_into_the_residual_first(kernels, dtype, assert_near, size):
    x, residual, weight = torch.randn(5, size).to(dtype), torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
    total = x.double() + residual.double()
    out = kernels.rms_norm(x, weight, eps=1e-5, residual=residual)
    assert_near(residual, total)
    wide = residual.double()
    assert_near(out, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double())


@pytest.mark.parametrize("size", [1, 17, 1536, 1000])
def test_silu_mul_gates(kernels, dtype, assert_near, size):
    gate_up = (torch.randn(7, 2 * size) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(kernels.silu_mul(gate_up) / 8, gate * gate.sigmoid() * up / 8)


def test_silu_mul_of_large_numbers_does_not_overflow(kernels, dtype, assert_near):
    gate = torch.tensor([-1e30, -200.0, -100.0, -1.0, 0.0, 1.0, 100.0, 200.0, 1e30])
    gate_up = torch.cat([gate, torch.ones(9)]).unsqueeze(0).to(dtype)
    assert_near(kernels.silu_mul(gate_up)[0], gate_up[0, :9].double() * gate_up[0, :9].double().sigmoid())


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("head_dim", [8, *HEAD_DIMS])
def test_rope_turns_each_pair_and_writes_keys_and_values_to_their_slots(
    kernels, dtype, assert_near, head_dim, block_size
):
    num_rows, num_heads, num_kv_heads, layer = 9, 6, 2, 1
    angles = torch.rand(50, head_dim // 2, dtype=torch.float64) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    kv = torch.full((20, 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    positions = torch.randint(50, (num_rows,)).int()
    slots = torch.randperm(20 * block_size)[:num_rows]
    slots[4] = -1
    query = kernels.rope_write_kv(qkv, cos_sin, kv, layer=layer, positions=positions, slots=slots, num_heads=num_heads)
    heads = qkv.view(num_rows, -1, head_dim).double()
    turn = torch.polar(torch.ones_like(angles), angles)[positions.long()].unsqueeze(1)
    half = head_dim // 2
    turned = torch.complex(heads[..., :half], heads[..., half:]) * turn
    turned = torch.cat([turned.real, turned.imag], dim=-1)
    assert_near(query, turned[:, :num_heads])
    written = [row for row in range(num_rows) if row != 4]
    blocks, offsets = slots[written] // block_size, slots[written] % block_size
    assert_near(kv[blocks, layer, 0, :, offsets], turned[written, num_heads : num_heads + num_kv_heads])
    assert torch.equal(kv[blocks, layer, 1, :, offsets].double(), heads[written, num_heads + num_kv_heads :])
    assert int((~kv.isnan()).sum()) == len(written) * 2 * num_kv_heads * head_dim


LINEAR_SHAPES = [(1, 1), (16, 32), (100, 33), (960, 576), (31, 1536), (70, 100), (70, 1601)]


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32, 33, 130])
@pytest.mark.parametrize(("out_size", "in_size"), LINEAR_SHAPES)
def test_linear_is_the_product_with_the_bias_added_once(kernels, dtype, assert_near, out_size, in_size, num_rows):
    x, bias = torch.randn(num_rows, in_size).to(dtype), torch.randn(out_size).to(dtype)
    weight = (torch.randn(out_size, in_size) / math.sqrt(in_size)).to(dtype)
    for used in (None, bias):
        truth = x.double() @ weight.double().T + (0 if used is None else used.double())
        assert_near(kernels.linear(x, kernels.pack_linear(weight, used)), truth)


@pytest.mark.parametrize("num_rows", [1, 20, 300])
@pytest.mark.parametrize("in_size", [1540, 1552, 4650])
def test_inputs_that_fill_their_last_part_of_a_block_keep_to_it(native, dtype, assert_is_near, in_size, num_rows):
    """Rows are packed in parts of 1,552 inputs, weights in steps of 32: a block ends with a part that holds no input, or almost none."""
    x = torch.randn(num_rows, in_size).to(dtype)
    weight = (torch.randn(50, in_size) / math.sqrt(in_size)).to(dtype)
    x[-1] = torch.nan
    result = native.linear(x, native.pack_linear(weight))
    assert result[-1].isnan().all()
    assert_is_near(result[:-1], x[:-1].double() @ weight.double().T)


@pytest.mark.parametrize(("out_size", "in_size"), [(16, 32), (49, 40), (300, 576)])
def test_the_rows_of_a_packed_weight_are_those_that_were_packed(kernels, dtype, out_size, in_size):
    weight = torch.randn(out_size, in_size).to(dtype)
    ids = torch.tensor([out_size - 1, 0, 7, 7, out_size // 2])
    rows = kernels.packed_rows(kernels.pack_linear(weight), ids)
    assert rows.is_contiguous() and torch.equal(rows, weight[ids])
    assert kernels.packed_rows(kernels.pack_linear(weight), ids[:0]).shape == (0, in_size)


def test_rows_that_a_packed_weight_does_not_have_are_refused(native, dtype):
    packed = native.pack_linear(torch.randn(40, 64).to(dtype))
    for number in (-1, 40):
        with pytest.raises(ValueError, match="below 40"):
            native.packed_rows(packed, torch.tensor([0, number]))
    with pytest.raises(ValueError, match="int64"):
        native.packed_rows(packed, torch.tensor([0], dtype=torch.int32))


def test_rows_of_a_rounded_weight_are_refused(kernels, dtype):
    packed = kernels.pack_linear(torch.randn(32, 64).to(dtype), int8=True)
    with pytest.raises(ValueError, match="plain weights only"):
        kernels.packed_rows(packed, torch.tensor([0]))


def test_a_weight_without_numbers_is_refused(native):
    for shape in ((0, 32), (32, 0)):
        for pack in (native.pack_linear, native.pack_linear_gated):
            with pytest.raises(ValueError, match="must have outputs and inputs"):
                pack(torch.empty(shape))


def test_linear_of_no_rows_is_empty(kernels, dtype):
    packed = kernels.pack_linear(torch.randn(24, 40).to(dtype))
    assert kernels.linear(torch.randn(0, 40).to(dtype), packed).shape == (0, 24)


@pytest.mark.parametrize(("out_size", "in_size"), [(7, 40), (1000, 64), (2003, 40)])
def test_linear_argmax_names_an_index_whose_value_is_largest(kernels, dtype, assert_near, out_size, in_size):
    num_rows = 5 if kernels.name == "triton" else 35
    x, weight = (
        torch.randn(num_rows, in_size).to(dtype),
        (torch.randn(out_size, in_size) / math.sqrt(in_size)).to(dtype),
    )
    logits = x.double() @ weight.double().T
    winner = kernels.linear_argmax(x, kernels.pack_linear(weight))
    assert winner.dtype == torch.int64
    assert_near(logits.gather(1, winner.unsqueeze(1)).to(dtype), logits.amax(dim=1, keepdim=True))


@pytest.mark.parametrize(("out_size", "in_size"), [(1, 3), (49, 64), (300, 100), (133, 576)])
def test_linear_logits_hold_what_linear_argmax_compares(kernels, dtype, out_size, in_size):
    x, weight = (torch.randn(33, in_size).to(dtype), torch.randn(out_size, in_size).to(dtype))
    packed = kernels.pack_linear(weight)
    logits = kernels.linear_logits(x, packed)
    assert logits.dtype == torch.float32 and logits.shape == (33, out_size)
    exact = x.double() @ weight.double().T
    assert (logits - exact).abs().max() <= exact.abs().max() * (2**-8 if dtype == torch.bfloat16 else 1e-5)
    winner = kernels.linear_argmax(x, packed)
    assert torch.equal(logits.gather(1, winner[:, None]).squeeze(1), logits.amax(dim=1))


def test_linear_argmax_passes_over_what_is_no_number(native, dtype):
    weight, x = torch.randn(300, 40).to(dtype), torch.randn(20, 40).to(dtype)
    weight[[0, 17, 130, 299]] = torch.nan
    expected = (x.double() @ weight.double().T).nan_to_num(-torch.inf).argmax(dim=1)
    assert native.linear_argmax(x, native.pack_linear(weight)).tolist() == expected.tolist()
    assert native.linear_argmax(x, native.pack_linear(weight * torch.nan)).tolist() == [0] * 20


def test_linear_argmax_takes_the_lowest_index_among_equals(kernels, dtype):
    weight = torch.zeros(300, 8).to(dtype)
    weight[[40, 41, 250]] = 1
    x = torch.tensor([[1.0] * 8, [0.0] * 8, [-1.0] * 8]).to(dtype)
    assert kernels.linear_argmax(x, kernels.pack_linear(weight)).tolist() == [40, 0, 0]


@pytest.mark.parametrize("num_rows", [1, 16, 31, 330])
@pytest.mark.parametrize("out_size", [3000, 2013])
def test_equals_in_any_share_of_the_outputs_leave_the_lowest_index(native, dtype, num_rows, out_size):
    # Each input has its equals, one or a few, anywhere.
    weight = (torch.rand(out_size, 32) < 3 / out_size).to(dtype)
    weight[torch.randint(out_size, (32,)), torch.arange(32)] = 1
    x = torch.eye(32).repeat(11, 1)[:num_rows].to(dtype)
    expected = weight.float().numpy().argmax(axis=0)[np.arange(num_rows) % 32]
    assert native.linear_argmax(x, native.pack_linear(weight)).tolist() == expected.tolist()
    lowest = native.pack_linear(torch.full((out_size, 32), -torch.inf).to(dtype))
    assert native.linear_argmax(torch.ones_like(x), lowest).tolist() == [0] * num_rows


def test_blocks_move_whole(kernels, dtype):
    kv = torch.randn(9, 2, 2, 1, 3, 8).to(dtype)
    before = kv.clone()
    staging = torch.full((4, *kv.shape[1:]), torch.nan, dtype=dtype)
    kernels.gather_blocks(kv, torch.tensor([7, 0, 3]), staging)
    assert torch.equal(staging[:3], before[[7, 0, 3]])
    assert staging[3].isnan().all()
    kernels.scatter_blocks(kv, torch.tensor([1, 2]), staging)
    kernels.copy_blocks(kv, torch.tensor([8, 8]), torch.tensor([4, 5]))
    assert torch.equal(kv, before[[0, 7, 0, 3, 8, 8, 6, 7, 8]])


def test_blocks_are_named_by_numbers_that_need_not_lie_together(kernels, dtype):
    kv = torch.randn(40, 2, 2, 1, 3, 8).to(dtype)
    before = kv.clone()
    pairs = torch.arange(40).view(20, 2)
    kernels.copy_blocks(kv, pairs[:, 0], pairs[:, 1])
    assert torch.equal(kv, before[torch.arange(40) // 2 * 2])


def test_blocks_without_a_place_are_refused(native, dtype):
    kv = torch.randn(9, 2, 2, 1, 3, 8).to(dtype)
    with pytest.raises(ValueError, match="2 blocks into 1"):
        native.copy_blocks(kv, torch.tensor([1, 2]), torch.tensor([3]))


@pytest.mark.parametrize("head_dim", [64, 80])
def test_eight_bit_kv_is_read_as_exactly_as_it_is_stored(kernels, dtype, make_attention_case, assert_near, head_dim):
    case = make_attention_case([(300, 9), (40, 1)], dtype=dtype, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    kv_scale = torch.rand(3, 2, 2) * 0.02 + 0.01
    stored = (case.kv.float() / kv_scale[:, :, :, None, None]).clamp(-448, 448).to(FP8_DTYPE)
    kept = dataclasses.replace(case, kv=(stored.float() * kv_scale[:, :, :, None, None]))
    arguments = {"layer": case.layer, "plan": case.split_plan(), "scale": case.scale, "kv_scale": kv_scale}
    if FP8_DTYPE not in kernels.kv_dtypes:
        with pytest.raises(ValueError, match="kv_scale: the native kernels keep keys and values as they are"):
            kernels.attention(case.query, stored, **arguments)
        return
    assert_near(kernels.attention(case.query, stored, **arguments), kept.truth())


def test_eight_bit_kv_is_written_rounded_and_saturated(kernels, dtype):
    if FP8_DTYPE not in kernels.kv_dtypes:
        pytest.skip(f"{kernels.name} kernels keep keys and values as they are")
    num_heads, num_kv_heads, head_dim, block_size = 3, 2, 16, 5
    kv = torch.full((4, 2, 2, num_kv_heads, block_size, head_dim), -7.0).to(FP8_DTYPE)
    x = torch.randn(6, 32).to(dtype)
    weight = torch.randn((num_heads + 2 * num_kv_heads) * head_dim, 32).to(dtype)
    kv_scale = 2.0 ** torch.randint(-9, 3, (2, 2, num_kv_heads))
    slots = torch.tensor([3, -1, 17, 0, 12, 6])
    no_turn = torch.cat([torch.ones(9, head_dim // 2), torch.zeros(9, head_dim // 2)], dim=-1)
    positions = torch.arange(6).int()
    packed = kernels.pack_linear(weight)
    kernels.linear_rope_write_kv(
        x, packed, no_turn, kv, layer=1, positions=positions, slots=slots, num_heads=num_heads, kv_scale=kv_scale
    )
    heads = kernels.linear(x, packed).view(6, -1, head_dim).float()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected = heads[row, num_heads:].view(2, num_kv_heads, head_dim) / kv_scale[1, :, :, None]
            assert torch.equal(
                kv[slot // block_size, 1, :, :, slot % block_size].float(),
                expected.clamp(-448, 448).to(FP8_DTYPE).float(),
            )
    assert int((kv.float() == -7).sum()) >= kv.numel() - 5 * 2 * num_kv_heads * head_dim


def test_eight_bit_blocks_move_whole(kernels):
    kv = torch.randint(0, 120, (9, 2, 2, 1, 3, 8)).to(torch.uint8).view(FP8_DTYPE)
    before = kv.clone().view(torch.uint8)
    staging = torch.zeros(2, *kv.shape[1:]).to(FP8_DTYPE)
    kernels.gather_blocks(kv, torch.tensor([7, 0]), staging)
    kernels.scatter_blocks(kv, torch.tensor([1, 2]), staging)
    kernels.copy_blocks(kv, torch.tensor([8]), torch.tensor([4]))
    assert torch.equal(kv.view(torch.uint8), before[[0, 7, 0, 3, 8, 5, 6, 7, 8]])
