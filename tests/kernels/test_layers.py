"""A forward pass in two operations: float64's answer on every backend, and the bits of the operations they are made of."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from batchllm.kernels.attention import AttentionPlan
from batchllm.kernels.between_attention import KvTarget, LayerEnd, LayerStart
from batchllm.kernels.layers import Layer, LayerOperations

EPS = 1e-5
BLOCK_SIZE = 16
PARTS = ("qkv", "output", "gate_up", "down")

SHAPES = [(64, 48, (4, 2, 64)), (70, 50, (3, 1, 80)), (96, 50, (2, 2, 128))]
"""Hidden size, gated size, and heads: of queries, of keys, numbers of each. With whole tiles and without."""
SMALL_SHAPES = [(64, 48, (4, 2, 16)), (70, 50, (3, 1, 24)), (64, 64, (2, 1, 40))]
"""With heads that need not be whole tiles, which Triton has no configuration for."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """One layer's, as they are loaded."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    output: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def make(cls, *, size, gated_size, heads, dtype):
        num_heads, num_kv_heads, head_dim = heads
        qkv_size = (num_heads + 2 * num_kv_heads) * head_dim

        def weight(out_size, in_size):
            return (torch.randn(out_size, in_size) / in_size**0.5).to(dtype)

        return cls(
            attention_norm=(0.5 + torch.rand(size)).to(dtype),
            qkv=weight(qkv_size, size),
            qkv_bias=torch.randn(qkv_size).to(dtype),
            output=weight(size, num_heads * head_dim),
            feed_forward_norm=(0.5 + torch.rand(size)).to(dtype),
            gate_up=weight(2 * gated_size, size),
            down=weight(size, gated_size),
        )

    def layer(self, kernels, int8=frozenset()):
        return Layer(
            start=LayerStart(
                norm=self.attention_norm, qkv=kernels.pack_linear(self.qkv, self.qkv_bias, int8="qkv" in int8)
            ),
            end=LayerEnd(
                output=kernels.pack_linear(self.output, int8="output" in int8),
                norm=self.feed_forward_norm,
                gate_up=kernels.pack_linear_gated(self.gate_up, int8="gate_up" in int8),
                down=kernels.pack_linear(self.down, int8="down" in int8),
            ),
        )


@dataclasses.dataclass(frozen=True)
class LayersCase:
    """Whole sequences of `lengths` rows through some layers. The pool has a layer more on both sides."""

    layers: list[Weights]
    residual: torch.Tensor
    lengths: list[int]
    heads: tuple[int, int, int]
    table: torch.Tensor
    cos_sin: torch.Tensor

    @classmethod
    def make(cls, lengths, *, size, gated_size, heads, dtype, num_layers=3):
        per_sequence = -(-max(lengths) // BLOCK_SIZE)
        angles = torch.rand(max(lengths), heads[2] // 2) * 6
        return cls(
            layers=[
                Weights.make(size=size, gated_size=gated_size, heads=heads, dtype=dtype) for _ in range(num_layers)
            ],
            residual=torch.randn(sum(lengths), size).to(dtype),
            lengths=lengths,
            heads=heads,
            table=torch.randperm(len(lengths) * per_sequence).int().reshape(len(lengths), per_sequence),
            cos_sin=torch.cat([angles.cos(), angles.sin()], dim=-1),
        )

    def pool(self):
        _, num_kv_heads, head_dim = self.heads
        shape = (self.table.numel(), len(self.layers) + 2, 2, num_kv_heads, BLOCK_SIZE, head_dim)
        return torch.full(shape, torch.nan, dtype=self.residual.dtype)

    def positions(self):
        return torch.cat([torch.arange(length) for length in self.lengths]).int()

    def tables(self):
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths)).int()

    def arguments(self, kv, rows):
        """What `to_last_attention` is given for the sequences' `rows`, a (first, stop) each."""
        chosen = torch.cat([torch.arange(first, stop) + sum(self.lengths[:n]) for n, (first, stop) in enumerate(rows)])
        positions, tables = self.positions()[chosen], self.tables()[chosen]
        blocks = self.table[tables.long(), positions.long() // BLOCK_SIZE].long()
        items, row = [], 0
        for first, stop in rows:
            items.append((row, stop - first, 0, stop, stop, -1))
            row += stop - first
        nothing = torch.empty(0, dtype=torch.int32)
        plan = AttentionPlan(
            positions=positions,
            tables=tables,
            block_table=self.table,
            items=torch.tensor(items, dtype=torch.int32),
            merge_rows=nothing,
            merge_start=torch.zeros(1, dtype=torch.int32),
            merge_partials=nothing,
            num_partials=0,
        )
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        target = KvTarget(self.cos_sin, kv, 1, positions, slots, self.heads[0])
        return chosen, {"eps": EPS, "target": target, "plan": plan, "scale": self.heads[2] ** -0.5}

    def whole(self, kv):
        return self.arguments(kv, [(0, length) for length in self.lengths])[1]

    def packed(self, kernels, int8=frozenset()):
        return kernels.pack_layers([weights.layer(kernels, int8) for weights in self.layers])

    def truth(self):
        """What the last attention gives, and the residual stream before it, float64 of all rows."""
        residual, attended = self.residual.double(), None
        for number, weights in enumerate(self.layers):
            if number:
                residual = end_truth(residual, attended, self.layers[number - 1])
            qkv = normed(residual, weights.attention_norm) @ weights.qkv.double().T + weights.qkv_bias.double()
            attended = self._attended(qkv)
        return attended, residual

    def _attended(self, qkv):
        num_heads, num_kv_heads, head_dim = self.heads
        parts = qkv.unflatten(1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        query, key, value = (part.split(self.lengths) for part in parts)
        results = []
        for q, k, v in zip(query, key, value, strict=True):
            cos, sin = self.cos_sin[: len(q)].double().unsqueeze(1).chunk(2, dim=-1)
            q, k = (
                torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
                for low, high in (side.chunk(2, dim=-1) for side in (q, k))
            )
            k, v = (side.repeat_interleave(num_heads // num_kv_heads, dim=1) for side in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
            scores.masked_fill_(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
            results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
        return torch.cat(results)


def normed(rows, weight):
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def end_truth(residual, attended, weights):
    residual = residual + attended @ weights.output.double().T
    gate, up = (normed(residual, weights.feed_forward_norm) @ weights.gate_up.double().T).chunk(2, dim=-1)
    return residual + (gate * gate.sigmoid() * up) @ weights.down.double().T


def in_turn(kernels):
    return LayerOperations(kernels.between_attention, kernels.attention, kernels.rms_norm)


@pytest.mark.parametrize(("size", "gated_size", "heads"), SHAPES)
def test_the_last_attention_gives_what_float64_gives_whether_rows_come_at_once_or_one_by_one(
    kernels, dtype, assert_near, size, gated_size, heads
):
    # In the interpreter a row takes milliseconds.
    lengths = [5, 1, 3] if kernels.name == "triton" else [40, 1, 17]
    case = LayersCase.make(lengths, size=size, gated_size=gated_size, heads=heads, dtype=dtype)
    layers, kv, truths = case.packed(kernels), case.pool(), case.truth()
    for rows in ([(0, max(1, length - 1)) for length in lengths], [(length - 1, length) for length in lengths]):
        chosen, arguments = case.arguments(kv, rows)
        residual = case.residual[chosen].clone()
        attended = kernels.to_last_attention(residual, layers, **arguments)
        # Two layers' roundings lie behind each number.
        assert_near(attended / 8, truths[0][chosen] / 8)
        assert_near(residual / 8, truths[1][chosen] / 8)
    assert kv[:, [0, -1]].isnan().all()


@pytest.mark.parametrize(("size", "gated_size", "heads"), SHAPES)
@pytest.mark.parametrize("rows", [[2], [0, 1, 2, 3, 4, 5], [5, 0, 3, 3]], ids=str)
def test_chosen_rows_behind_the_last_attention_are_what_float64_gives(
    kernels, dtype, assert_near, size, gated_size, heads, rows
):
    case = LayersCase.make([6], size=size, gated_size=gated_size, heads=heads, dtype=dtype, num_layers=2)
    attended = torch.randn(6, heads[0] * heads[2]).to(dtype)
    norm = case.layers[0].attention_norm
    hidden = kernels.after_last_attention(
        case.residual.clone(), attended, case.packed(kernels), rows=torch.tensor(rows), norm=norm, eps=EPS
    )
    truth = normed(end_truth(case.residual.double(), attended.double(), case.layers[1]), norm)
    assert_near(hidden / 4, truth[rows] / 4)


@pytest.mark.parametrize("lengths", [[1], [33], [300, 1, 350]])
@pytest.mark.parametrize(("size", "gated_size", "heads"), SHAPES[:1] + SMALL_SHAPES)
def test_all_layers_at_once_have_the_bits_of_one_operation_after_the_other(
    native, dtype, size, gated_size, heads, lengths
):
    case = LayersCase.make(lengths, size=size, gated_size=gated_size, heads=heads, dtype=dtype)
    assert_same_bits(native, case)


def test_rows_that_are_just_enough_for_passes_have_the_bits_of_one_operation_after_the_other(native, dtype):
    for num_rows in (191, 192, 193):
        case = LayersCase.make([num_rows - 1, 1], size=576, gated_size=512, heads=(4, 2, 64), dtype=dtype, num_layers=2)
        assert_same_bits(native, case)


@pytest.fixture
def eight_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [800, 769, 790])
def test_a_short_last_pass_has_the_bits_of_one_operation_after_the_other(native, dtype, eight_threads, num_rows):
    """Eight threads take 112 rows each, the last one 16 of 800, 97 of 769 and 6 of 790: fewer rows are multiplied with more weights at once."""
    case = LayersCase.make([num_rows - 1, 1], size=576, gated_size=256, heads=(4, 2, 16), dtype=dtype, num_layers=2)
    assert_same_bits(native, case)


@pytest.mark.parametrize("int8", [PARTS, *((part,) for part in PARTS), ("qkv", "output", "gate_up")], ids="-".join)
def test_layers_with_int8_weights_have_the_bits_of_one_operation_after_the_other(native, dtype, int8):
    for size, gated_size, heads in SMALL_SHAPES[:2]:
        case = LayersCase.make([60, 3], size=size, gated_size=gated_size, heads=heads, dtype=dtype)
        assert_same_bits(native, case, frozenset(int8))


@pytest.mark.parametrize("head_dim", [8, 96, 128, 256])
def test_layers_of_every_head_dim_have_the_bits_of_one_operation_after_the_other(native, dtype, head_dim):
    case = LayersCase.make([35, 2], size=64, gated_size=48, heads=(3, 1, head_dim), dtype=dtype)
    assert_same_bits(native, case)


def assert_same_bits(kernels, case, int8=frozenset()):
    layers, packed = [weights.layer(kernels, int8) for weights in case.layers], case.packed(kernels, int8)
    pools, residuals = [case.pool(), case.pool()], [case.residual.clone(), case.residual.clone()]
    attended = kernels.to_last_attention(residuals[0], packed, **case.whole(pools[0]))
    expected = in_turn(kernels).to_last_attention(residuals[1], layers, **case.whole(pools[1]))
    assert attended.isfinite().all()
    assert torch.equal(attended, expected)
    assert torch.equal(*residuals)
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())
    num_rows = len(case.residual)
    for rows in (torch.arange(num_rows), torch.arange(num_rows).flip(0), torch.randint(num_rows, (2 * num_rows + 1,))):
        arguments = {"rows": rows, "norm": case.layers[0].feed_forward_norm, "eps": EPS}
        expected = in_turn(kernels).after_last_attention(residuals[1], attended, layers, **arguments)
        assert torch.equal(kernels.after_last_attention(residuals[0].clone(), attended, packed, **arguments), expected)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_without_the_last_attention_its_keys_and_values_are_written_all_the_same(kernels, dtype, num_layers):
    case = LayersCase.make([6, 1], size=64, gated_size=48, heads=(2, 1, 64), dtype=dtype, num_layers=num_layers)
    layers = case.packed(kernels)
    pools, residuals = [case.pool(), case.pool()], [case.residual.clone(), case.residual.clone()]
    arguments = case.whole(pools[0])
    arguments["plan"] = dataclasses.replace(arguments["plan"], last_items=torch.empty(0, 6, dtype=torch.int32))
    assert kernels.to_last_attention(residuals[0], layers, **arguments) is None
    kernels.to_last_attention(residuals[1], layers, **case.whole(pools[1]))
    assert torch.equal(*residuals)
    assert int(pools[0][:, num_layers].isfinite().sum()) == 7 * 2 * 64
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


@pytest.mark.parametrize("num_layers", [1, 3])
def test_rows_that_the_last_layer_attends_have_the_bits_they_have_among_all_rows(kernels, dtype, num_layers):
    case = LayersCase.make([6, 3], size=64, gated_size=48, heads=(2, 1, 64), dtype=dtype, num_layers=num_layers)
    layers = case.packed(kernels)
    pools, residuals = [case.pool(), case.pool()], [case.residual.clone(), case.residual.clone()]
    arguments = case.whole(pools[0])
    last_items = torch.tensor([[4, 2, 0, 6, 6, -1], [8, 1, 0, 3, 3, -1]], dtype=torch.int32)
    arguments["plan"] = dataclasses.replace(arguments["plan"], last_items=last_items)
    attended = kernels.to_last_attention(residuals[0], layers, **arguments)
    expected = kernels.to_last_attention(residuals[1], layers, **case.whole(pools[1]))
    assert torch.equal(attended[[4, 5, 8]], expected[[4, 5, 8]])
    assert not attended[[0, 1, 2, 3, 6, 7]].any()
    assert torch.equal(*residuals)
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


def test_no_rows_go_through_layers(native, dtype):
    case = LayersCase.make([3], size=64, gated_size=48, heads=(2, 1, 64), dtype=dtype)
    kv = case.pool()
    arguments = case.whole(kv)
    plan = dataclasses.replace(
        arguments["plan"],
        positions=arguments["plan"].positions[:0],
        tables=arguments["plan"].tables[:0],
        items=arguments["plan"].items[:0],
    )
    target = dataclasses.replace(arguments["target"], positions=plan.positions, slots=arguments["target"].slots[:0])
    attended = native.to_last_attention(
        case.residual[:0], case.packed(native), eps=EPS, target=target, plan=plan, scale=1.0
    )
    assert attended.shape == (0, 128)
    assert kv.isnan().all()
    hidden = native.after_last_attention(
        case.residual,
        torch.randn(3, 128).to(dtype),
        case.packed(native),
        rows=plan.items[:0, 0].long(),
        eps=EPS,
        norm=case.layers[0].feed_forward_norm,
    )
    assert hidden.shape == (0, 64)


def test_packed_layers_keep_their_weights(native, dtype):
    case = LayersCase.make([20], size=576, gated_size=512, heads=(4, 2, 64), dtype=dtype)
    layers, kv = case.packed(native), case.pool()
    first = native.to_last_attention(case.residual.clone(), layers, **case.whole(kv))
    gc.collect()
    # What takes the place of weights that are gone.
    others = [
        weights.layer(native)
        for weights in LayersCase.make([20], size=576, gated_size=512, heads=(4, 2, 64), dtype=dtype).layers
    ]
    assert torch.equal(first, native.to_last_attention(case.residual.clone(), layers, **case.whole(kv)))
    assert len(others) == 3


CHANGES = {
    "norm": lambda weights: dataclasses.replace(weights, feed_forward_norm=weights.down[0, :48].contiguous()),
    "output": lambda weights: dataclasses.replace(weights, output=weights.output[:, :48].contiguous()),
    "gate_up": lambda weights: dataclasses.replace(weights, gate_up=weights.gate_up[:64]),
    "down": lambda weights: dataclasses.replace(weights, down=weights.down[:48]),
    "qkv": lambda weights: dataclasses.replace(weights, qkv=weights.qkv[:96], qkv_bias=weights.qkv_bias[:96]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_whose_weights_do_not_fit_the_others_is_refused(native, dtype, name):
    case = LayersCase.make([3], size=64, gated_size=48, heads=(4, 2, 16), dtype=dtype)
    case.layers[1] = CHANGES[name](case.layers[1])
    with pytest.raises(ValueError, match=name):
        case.packed(native)


def test_rows_and_pools_that_do_not_fit_the_layers_are_refused(native, dtype):
    case = LayersCase.make([3], size=64, gated_size=48, heads=(4, 2, 16), dtype=dtype)
    layers, kv = case.packed(native), case.pool()
    arguments = case.whole(kv)

    def refuses(match, residual=case.residual, **target):
        changed = {**arguments, "target": dataclasses.replace(arguments["target"], **target)}
        with pytest.raises(ValueError, match=match):
            native.to_last_attention(residual, layers, **changed)

    other = torch.float64
    refuses("contiguous", residual=torch.randn(64, 3).to(dtype).T)
    refuses("residual", residual=torch.randn(3, 48).to(dtype))
    refuses("one type", residual=case.residual.to(other))
    refuses("one type", kv=kv.to(other))
    refuses("contiguous", kv=kv.transpose(3, 4).contiguous().transpose(3, 4))
    refuses("heads", num_heads=3)
    refuses("layers 3 to 5 of a pool of 5", layer=3)
    refuses("layer -1 of a pool", layer=-1)
    refuses("2 slots", slots=arguments["target"].slots[:2])
    refuses("slots int64", slots=arguments["target"].slots.int())
    refuses("int32", positions=arguments["target"].positions.long())
    refuses("cos_sin", cos_sin=case.cos_sin.double())
    for last_items in (torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int32)):
        plan = dataclasses.replace(arguments["plan"], last_items=last_items)
        with pytest.raises(ValueError, match="last_items"):
            native.to_last_attention(case.residual, layers, **arguments | {"plan": plan})
    refuses("kv_scale", kv_scale=torch.ones(5, 2, 2))
    assert kv.isnan().all()


def test_rows_that_do_not_fit_what_lies_behind_the_last_attention_are_refused(native, dtype):
    case = LayersCase.make([3], size=64, gated_size=48, heads=(4, 2, 16), dtype=dtype)
    layers = case.packed(native)
    right = {
        "residual": case.residual,
        "attended": torch.randn(3, 64).to(dtype),
        "rows": torch.tensor([2, 0]),
        "norm": case.layers[0].feed_forward_norm,
    }

    def refuses(match, **changed):
        with pytest.raises(ValueError, match=match):
            native.after_last_attention(layers=layers, eps=EPS, **{**right, **changed})

    before = case.residual.clone()
    refuses("below 3", rows=torch.tensor([0, 1, 3]))
    refuses("below 3", rows=torch.tensor([-1]))
    refuses("rows: must be int64", rows=torch.tensor([0], dtype=torch.int32))
    refuses("rows: must be contiguous", rows=torch.arange(4)[::2])
    refuses("contiguous", residual=torch.randn(64, 3).to(dtype).T)
    refuses("64 numbers a row", residual=torch.randn(3, 48).to(dtype))
    refuses("64 of attention", attended=torch.randn(2, 64).to(dtype))
    refuses("norm", norm=torch.randn(48).to(dtype))
    refuses("one type", norm=right["norm"].double())
    assert torch.equal(case.residual, before)
