"""Linear layers over weights packed once: `y = x W^T + b`, and the products with a fused end that the decoder needs.

Shapes: x [num_rows, in_size], weight [out_size, in_size], y [num_rows, out_size].
Bound: weight bytes for few rows, FLOPs for many.

Quantised weights are int8 or e4m3 with one float32 scale per output channel, `w = scale * q`. Over e4m3 the product runs
in x's dtype, into which q goes exactly, with float32 sums, and is scaled at its end.

Over int8 weights each row of x is rounded to int8 too, with a scale of its own (`quantise_rows`): the products are whole numbers and
their sums exact, so y = sum * row scale * channel scale + bias, in float32 and in this order, is the same bit for bit on
every backend, and a row's bits are its own.

On a GPU a plain product is torch's own, which is at the measured rate by definition. The Triton kernels are for what
torch lacks: 8-bit weights (half or a quarter of the bytes; e4m3 is widened in registers on its way to the tensor cores),
and the argmax over a vocabulary without writing its logits (256 rows x 128k float32 would be 131 MB a step).
Neighbouring programs take tiles of the same weight columns, so that weights come from memory once; few rows take
narrow tiles, so that a layer still fills the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from batchllm.kernels.activation import silu_mul, silu_mul_triton
from batchllm.kernels.floats import E4M3_MAX, FP8_DTYPE, as_kernel_operand, product, widen
from batchllm.kernels.launch import jit, launch, next_power_of_2, tl
from batchllm.kernels.rope import rope_write_kv, rope_write_kv_triton
from batchllm.kernels.tuning import Config, bounded_config, launch_options, num_processors


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the form that one backend multiplies with; made by its `pack_linear`, opaque to all else.

    `scale` float32 [out_size], with an int8 or e4m3 weight: what each output channel is multiplied with.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_size: int
    in_size: int
    scale: torch.Tensor | None = None


MAX_INT8_INPUTS = 1 << 16
"""Up to here the sum of products of bytes fits into 32 bits, whichever way they are signed."""

_EXACT_INT8_INPUTS = (1 << 24) // 127**2
"""Up to here float32 holds the sum of products of int8 exactly."""

_LEAST_MAGNITUDE = 1e-30
"""Rows are not magnified beyond it: a row of smaller numbers becomes zeros."""


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, int8: bool = False) -> PackedLinear:
    """Takes the weight [out_size, in_size] as it is, for the plain product needs no other form, or rounds it to `int8`."""
    if int8:
        return quantise_linear(weight, bias, dtype=torch.int8)
    return PackedLinear(weight=weight.contiguous(), bias=bias, out_size=weight.shape[0], in_size=weight.shape[1])


def packed_rows(packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` int64 [n] of a weight that `pack_linear` took, [n, in_size], as they were. Raises ValueError for one that was rounded."""
    if packed.scale is not None:
        raise ValueError("rows are read from plain weights only")
    return packed.weight[ids]


def quantise_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: torch.dtype) -> PackedLinear:
    """The weight rounded to `dtype`, as by `quantise_weight`."""
    rounded, scale = quantise_weight(weight, dtype=dtype)
    return PackedLinear(weight=rounded, bias=bias, out_size=weight.shape[0], in_size=weight.shape[1], scale=scale)


def quantise_weight(weight: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight rounded to `dtype`, torch.int8 or torch.float8_e4m3fn, and the float32 scales [out_size] that take each output
    channel to its largest magnitude. Raises ValueError for another dtype, and where int8 sums would not fit."""
    largest = {torch.int8: 127.0, FP8_DTYPE: E4M3_MAX}.get(dtype)
    if largest is None:
        raise ValueError(f"weights are quantised to int8 or float8_e4m3fn, not to {dtype}")
    if dtype == torch.int8 and weight.shape[1] > MAX_INT8_INPUTS:
        raise ValueError(f"int8 weights have at most {MAX_INT8_INPUTS} inputs, not {weight.shape[1]}")
    wide = weight.float()
    # A channel of zeros gets scale 1: its quotients stay zeros.
    scale = wide.abs().amax(dim=1) / largest
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    quotients = (wide / scale[:, None]).clamp(-largest, largest)
    rounded = quotients.round().to(dtype) if dtype == torch.int8 else quotients.to(dtype)
    return rounded.contiguous(), scale


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x rounded to int8, ties to even, and the float32 scales [num_rows] that take each row to its largest magnitude.

    A row with a number that is not finite becomes zeros with scale NaN, so that all of y's row is NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=1)
    is_finite = largest.isfinite()
    largest = largest.clamp(min=_LEAST_MAGNITUDE)
    # A number over a tensor would be its reciprocal times the number, rounded twice.
    factor = torch.full_like(largest, 127.0) / largest
    rounded = (wide * factor[:, None]).round()
    rounded = torch.where(is_finite[:, None], rounded, torch.zeros_like(rounded))
    return rounded.to(torch.int8), torch.where(is_finite, largest / 127.0, torch.nan)


def pack_linear_gated(weight: torch.Tensor, bias: torch.Tensor | None = None, *, int8: bool = False) -> PackedLinear:
    """As `pack_linear`, for `linear_silu_mul` alone: the rows of the gate [size, in_size], then those of up."""
    return pack_linear(weight, bias, int8=int8)


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """y in x's dtype, accumulated in float32 or better."""
    if packed.scale is None:
        return F.linear(x, packed.weight, packed.bias)
    return _scaled_product(x, packed).to(x.dtype)


def linear_logits(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """y in float32, the values that `linear_argmax` compares: a row must get the same token whichever of the two its batch needs.

    The plain product rounds y to x's dtype on the way, as torch's does.
    """
    return (F.linear(x, packed.weight, packed.bias) if packed.scale is None else _scaled_product(x, packed)).float()


def linear_argmax(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """The index int64 [num_rows] of the largest of y's float32 values; the lowest index among equals."""
    # argmax leaves the choice among equals open, so the first maximum is found by comparison.
    logits = linear_logits(x, packed)
    return (logits == logits.amax(dim=-1, keepdim=True)).to(torch.uint8).argmax(dim=-1)


def _scaled_product(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    assert packed.scale is not None
    if packed.weight.dtype == torch.int8:
        rows, row_scale = quantise_rows(x)
        exact = torch.float32 if packed.in_size <= _EXACT_INT8_INPUTS else torch.float64
        y = F.linear(rows.to(exact), packed.weight.to(exact)).float() * row_scale[:, None] * packed.scale
    else:
        y = F.linear(x.float(), packed.weight.float()) * packed.scale
    return y if packed.bias is None else y + packed.bias.float()


@jit()
def _product_tile(
    x: tl.tensor,
    weight: tl.tensor,
    row_scale: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    row_stride: tl.tensor,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
) -> tl.tensor:
    """The float32 tile of y at `row` x `column`. Rows and columns behind the end repeat the last one.

    With scales of rows, x and weights are int8 and their sums int32.
    """
    depth = tl.arange(0, TILE_DEPTH)
    x_tile = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * row_stride + depth[None, :]
    channel = tl.minimum(column, out_size - 1)
    weight_tile = weight + channel.to(tl.int64)[:, None] * in_size + depth[None, :]
    y = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32 if HAS_ROW_SCALE else tl.float32)
    for start in range(0, in_size, TILE_DEPTH):
        if EVEN_DEPTH:
            left = tl.load(x_tile + start)
            right = tl.load(weight_tile + start)
        else:
            inside = (depth < in_size - start)[None, :]
            left = tl.load(x_tile + start, mask=inside, other=0.0)
            right = tl.load(weight_tile + start, mask=inside, other=0.0)
        if HAS_ROW_SCALE:
            y = tl.dot(left, tl.trans(right), y, out_dtype=tl.int32)
        else:
            y = product(left, tl.trans(widen(right, left.dtype)), y)
    if HAS_ROW_SCALE:
        y = y.to(tl.float32) * tl.load(row_scale + tl.minimum(row, num_rows - 1))[:, None]
    if HAS_SCALE:
        y = y * tl.load(scale + channel)[None, :]
    if HAS_BIAS:
        y = y + tl.load(bias + channel).to(tl.float32)[None, :]
    return y


@jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    row_scale: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    # Groups of row tiles go down the columns together: their part of x stays in the cache while weights stream through.
    tiles_down = tl.cdiv(num_rows, TILE_ROWS)
    tiles_across = tl.cdiv(out_size, TILE_COLUMNS)
    program = tl.program_id(0)
    first = program // (GROUP_TILES * tiles_across) * GROUP_TILES
    in_group = tl.minimum(tiles_down - first, GROUP_TILES)
    local = program % (GROUP_TILES * tiles_across)
    row = (first + local % in_group) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = local // in_group * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    y = _product_tile(
        x,
        weight,
        row_scale,
        scale,
        bias,
        row,
        column,
        num_rows,
        out_size,
        in_size,
        row_stride,
        HAS_ROW_SCALE,
        HAS_SCALE,
        HAS_BIAS,
        EVEN_DEPTH,
        TILE_ROWS,
        TILE_COLUMNS,
        TILE_DEPTH,
    )
    mask = (row < num_rows)[:, None] & (column < out_size)[None, :]
    place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if ADD:
        y += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, y.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_rows"])
def _linear_argmax_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    row_scale: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    peaks: tl.tensor,
    indexes: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    row_stride: tl.tensor,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    index = tl.zeros([TILE_ROWS], tl.int32)
    for tile in range(tl.program_id(1), tl.cdiv(out_size, TILE_COLUMNS), tl.num_programs(1)):
        column = tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        y = _product_tile(
            x,
            weight,
            row_scale,
            scale,
            bias,
            row,
            column,
            num_rows,
            out_size,
            in_size,
            row_stride,
            HAS_ROW_SCALE,
            HAS_SCALE,
            HAS_BIAS,
            EVEN_DEPTH,
            TILE_ROWS,
            TILE_COLUMNS,
            TILE_DEPTH,
        )
        # Columns behind the end repeat the last one: equal, and higher in index, so they never win.
        top = tl.max(y, 1)
        where = tl.min(tl.where(y == top[:, None], column[None, :], 2147483647), 1)
        # Tiles come in ascending order: among equals the earlier one stays.
        index = tl.where(top > peak, where, index)
        peak = tl.maximum(peak, top)
    place = tl.program_id(1).to(tl.int64) * num_rows + row
    tl.store(peaks + place, peak, mask=row < num_rows)
    tl.store(indexes + place, index, mask=row < num_rows)


@jit(do_not_specialize=["num_rows"])
def _pick_peak_kernel(
    peaks: tl.tensor, indexes: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_parts: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    place = part.to(tl.int64) * num_rows + row
    peak = tl.load(peaks + place, mask=part < num_parts, other=float("-inf"))
    index = tl.load(indexes + place, mask=part < num_parts, other=2147483647)
    tl.store(out + row, tl.min(tl.where(peak == tl.max(peak, 0), index, 2147483647), 0).to(tl.int64))


def linear_triton(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """`linear` on a GPU: torch's product for a plain weight, the Triton kernel for a quantised one."""
    if packed.scale is None:
        return F.linear(x, packed.weight, packed.bias)
    out = torch.empty(x.shape[0], packed.out_size, dtype=x.dtype, device=x.device)
    _launch_product(x, packed, out, add=False)
    return out


def _launch_product(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, *, add: bool) -> None:
    """Writes y into the rows of `out`, or adds it to them before they are rounded."""
    config = _config(x, packed)
    num_tiles = -(-x.shape[0] // config["tile_rows"]) * -(-packed.out_size // config["tile_columns"])
    ends = {"out": out, "out_stride": out.stride(0), "GROUP_TILES": 8, "ADD": add}
    launch(
        _linear_kernel,
        (num_tiles,),
        device=x.device,
        arguments={**_product_arguments(x, packed, config), **ends},
        options=launch_options(config),
    )


def linear_logits_triton(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """`linear_logits` on a GPU: the float32 sums as they are, for any packed weight."""
    out = torch.empty(x.shape[0], packed.out_size, dtype=torch.float32, device=x.device)
    _launch_product(x, packed, out, add=False)
    return out


def linear_argmax_triton(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """`linear_argmax` on a GPU, for any packed weight; compares the float32 sums before they are rounded to x's
    dtype."""
    num_rows = x.shape[0]
    config = _config(x, packed)
    tiles_down = -(-num_rows // config["tile_rows"])
    tiles_across = -(-packed.out_size // config["tile_columns"])
    num_parts = min(tiles_across, max(1, 2 * num_processors(x.device) // max(1, tiles_down)))
    peaks = torch.empty(num_parts, num_rows, device=x.device)
    indexes = torch.empty(num_parts, num_rows, dtype=torch.int32, device=x.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    launch(
        _linear_argmax_kernel,
        (tiles_down, num_parts),
        device=x.device,
        arguments={**_product_arguments(x, packed, config), "peaks": peaks, "indexes": indexes},
        options=launch_options(config),
    )
    launch(
        _pick_peak_kernel,
        (num_rows,),
        device=x.device,
        arguments={
            "peaks": peaks,
            "indexes": indexes,
            "out": out,
            "num_rows": num_rows,
            "num_parts": num_parts,
            "BLOCK": next_power_of_2(num_parts),
        },
        options={"num_warps": 1},
    )
    return out


def _product_arguments(x: torch.Tensor, packed: PackedLinear, config: Config) -> dict[str, object]:
    rows, row_scale = quantise_rows(x) if packed.weight.dtype == torch.int8 else (x, None)
    return {
        "x": rows,
        "weight": as_kernel_operand(packed.weight),
        "row_scale": row_scale,
        "scale": packed.scale,
        "bias": packed.bias,
        "num_rows": x.shape[0],
        "out_size": packed.out_size,
        "in_size": packed.in_size,
        "row_stride": rows.stride(0),
        "HAS_ROW_SCALE": row_scale is not None,
        "HAS_SCALE": packed.scale is not None,
        "HAS_BIAS": packed.bias is not None,
        "EVEN_DEPTH": packed.in_size % config["tile_depth"] == 0,
        "TILE_ROWS": config["tile_rows"],
        "TILE_COLUMNS": config["tile_columns"],
        "TILE_DEPTH": config["tile_depth"],
    }


def _config(x: torch.Tensor, packed: PackedLinear) -> Config:
    """Kinds: `int8` weights, whose rows are int8 as well; `fp8` weights under a 16-bit x, `half` where both have 16 bits, `float`
    for a float32 x with any other weight."""
    kind = {torch.int8: "int8", FP8_DTYPE: "fp8"}.get(packed.weight.dtype, "half")
    is_float = x.dtype == torch.float32 and kind != "int8"
    return bounded_config("linear", "float" if is_float else kind, x.shape[0], x.device)


def linear_add(x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor) -> None:
    """Adds y **in place** into `residual` [num_rows, out_size]."""
    residual += linear(x, packed)


def linear_silu_mul(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """silu(gate) * up [num_rows, out_size / 2] of the two halves of y; `packed` by `pack_linear_gated`."""
    return silu_mul(linear(x, packed))


def linear_rope_write_kv(
    x: torch.Tensor,
    packed: PackedLinear,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_write_kv` of y."""
    return rope_write_kv(
        linear(x, packed),
        cos_sin,
        kv,
        layer=layer,
        positions=positions,
        slots=slots,
        num_heads=num_heads,
        kv_scale=kv_scale,
    )


def linear_add_triton(x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor) -> None:
    """`linear_add` on a GPU, at the end of the product: y is not rounded before it is added, nor written by itself."""
    if packed.scale is not None:
        _launch_product(x, packed, residual, add=True)
    elif packed.bias is None:
        residual.addmm_(x, packed.weight.t())
    else:
        residual += F.linear(x, packed.weight, packed.bias)


def linear_silu_mul_triton(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """`linear_silu_mul`."""
    return silu_mul_triton(linear_triton(x, packed))


def linear_rope_write_kv_triton(
    x: torch.Tensor,
    packed: PackedLinear,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    *,
    layer: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear_rope_write_kv`."""
    return rope_write_kv_triton(
        linear_triton(x, packed),
        cos_sin,
        kv,
        layer=layer,
        positions=positions,
        slots=slots,
        num_heads=num_heads,
        kv_scale=kv_scale,
    )
