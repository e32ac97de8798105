"""Random inputs with float64 answers for each operation of `kernels/` but attention (that is `attention_cases.py`).

The tests and `gpu.py` check kernels with them. Each `*_share` function runs one operation on inputs of the given shape
and returns its largest error as a share of the tolerance of its dtype, so anything up to 1 is right.
"""

from __future__ import annotations

import torch

from batchllm.kernels import activation, blocks, linear, norm, rope, sampling
from batchllm.kernels.floats import E4M3_MAX, FP8_DTYPE

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest |got - answer| / (1 + |answer|) on inputs of unit size: about four roundings of the dtype, or float32 sums of
a few hundred terms. CPU kernels are held to half of it."""


def error_share(got: torch.Tensor, answer: torch.Tensor, *, dtype: torch.dtype) -> float:
    """The largest error as a share of the tolerance of `dtype`; NaN counts as infinite."""
    error = (got.cpu().double() - answer).abs() / (1 + answer.abs()) / TOLERANCE[dtype]
    return float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0


def rms_norm_share(
    num_rows: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device, has_residual: bool
) -> float:
    generator = torch.Generator().manual_seed(num_rows)
    x, residual = torch.randn(2, num_rows, hidden_size, generator=generator).to(dtype)
    weight = (1 + 0.1 * torch.randn(hidden_size, generator=generator)).to(dtype)
    h = x.double()
    share = 0.0
    added = residual.clone().to(device) if has_residual else None
    got = norm.rms_norm_triton(x.to(device), weight.to(device), eps=1e-5, residual=added)
    if added is not None:
        # The sum is rounded to the dtype before it is normed: from there the answer follows what was written.
        share = error_share(added, x.double() + residual.double(), dtype=dtype)
        h = added.cpu().double()
    answer = h * torch.rsqrt(h.pow(2).mean(dim=-1, keepdim=True) + 1e-5) * weight.double()
    return max(share, error_share(got, answer, dtype=dtype))


def silu_mul_share(num_rows: int, size: int, *, dtype: torch.dtype, device: torch.device) -> float:
    gate_up = (3 * torch.randn(num_rows, 2 * size, generator=torch.Generator().manual_seed(size))).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    return error_share(activation.silu_mul_triton(gate_up.to(device)), gate * gate.sigmoid() * up, dtype=dtype)


def rope_write_kv_share(
    num_rows: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> float:
    """Queries, and the whole pool: written slots against the float64 rotation, all others against what lay there."""
    generator = torch.Generator().manual_seed(head_dim)
    block_size, layer, kv_dtype = 16, 1, kv_dtype or dtype
    num_blocks = num_rows // block_size + 2
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, 5000, (num_rows,), generator=generator, dtype=torch.int32)
    frequency = 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    angle = torch.arange(5000)[:, None] * frequency
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=-1).float()
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_rows]
    slots[::3] = -1
    kv_scale = torch.rand(2, 2, num_kv_heads, generator=generator) * 0.01 + 0.002 if kv_dtype == FP8_DTYPE else None
    before = torch.randn(num_blocks, 2, 2, num_kv_heads, block_size, head_dim, generator=generator).to(kv_dtype)
    kv = before.to(device)
    query = rope.rope_write_kv_triton(
        qkv.to(device),
        cos_sin.to(device),
        kv,
        layer=layer,
        positions=positions.to(device),
        slots=slots.to(device),
        num_heads=num_heads,
        kv_scale=None if kv_scale is None else kv_scale.to(device),
    )
    heads = qkv.double().view(num_rows, -1, head_dim)
    cos, sin = cos_sin[positions.long()].double().unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    share = error_share(query, rotated[:, :num_heads], dtype=dtype)
    written = (slots >= 0).nonzero().squeeze(1)
    block, offset = slots[written] // block_size, slots[written] % block_size
    after = kv.cpu()
    for side, answer in enumerate(
        (rotated[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :])
    ):
        stored = after[:, layer, side].transpose(1, 2)[block, offset].double()
        answer = answer[written]
        if kv_scale is None:
            share = max(share, error_share(stored, answer, dtype=dtype))
            continue
        answer = (answer / kv_scale[layer, side].double()[None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
        # Half a step of 3 mantissa bits, half the smallest subnormal, and the rounding to the query's dtype before
        # that.
        allowed = answer.abs() * (2.0**-4 + TOLERANCE[dtype]) + 2.0**-10
        share = max(share, float(((stored - answer).abs() / allowed).nan_to_num(nan=torch.inf).max()))
    # Everything else in the pool is as it was.
    untouched = after.view(torch.uint8).view(*before.shape[:-1], -1).clone()
    original = before.view(torch.uint8).view(*before.shape[:-1], -1)
    untouched[block, layer, :, :, offset] = original[block, layer, :, :, offset]
    return share if torch.equal(untouched, original) else float("inf")


def packed_weight(
    out_size: int, in_size: int, *, kind: str, dtype: torch.dtype, device: torch.device, has_bias: bool
) -> linear.PackedLinear:
    """`kind`: plain, int8 or fp8."""
    generator = torch.Generator().manual_seed(out_size)
    weight = torch.randn(out_size, in_size, generator=generator) * in_size**-0.5
    bias = torch.randn(out_size, generator=generator).to(dtype).to(device) if has_bias else None
    weight = weight.to(dtype).to(device)
    if kind == "plain":
        return linear.pack_linear(weight, bias)
    return linear.quantise_linear(weight, bias, dtype=torch.int8 if kind == "int8" else FP8_DTYPE)


def linear_answer(x: torch.Tensor, packed: linear.PackedLinear) -> torch.Tensor:
    weight, rows = packed.weight.cpu().double(), x.cpu().double()
    if packed.weight.dtype == torch.int8:
        # Rounding rows is part of the meaning.
        rounded, row_scale = linear.quantise_rows(x.cpu())
        rows = rounded.double() * row_scale.double()[:, None]
    if packed.scale is not None:
        weight = weight * packed.scale.cpu().double()[:, None]
    y = rows @ weight.T
    return y if packed.bias is None else y + packed.bias.cpu().double()


def linear_share(
    num_rows: int,
    *,
    out_size: int,
    in_size: int,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    has_bias: bool = False,
) -> float:
    packed = packed_weight(out_size, in_size, kind=kind, dtype=dtype, device=device, has_bias=has_bias)
    x = torch.randn(num_rows, in_size, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    return error_share(linear.linear_triton(x, packed), linear_answer(x, packed), dtype=dtype)


def linear_add_share(
    num_rows: int, *, out_size: int, in_size: int, kind: str, dtype: torch.dtype, device: torch.device
) -> float:
    packed = packed_weight(out_size, in_size, kind=kind, dtype=dtype, device=device, has_bias=False)
    x, residual = (
        torch.randn(num_rows, n, generator=torch.Generator().manual_seed(n)).to(dtype).to(device)
        for n in (in_size, out_size)
    )
    answer = residual.cpu().double() + linear_answer(x, packed)
    linear.linear_add_triton(x, packed, residual)
    return error_share(residual, answer, dtype=dtype)


def linear_argmax_share(
    num_rows: int,
    *,
    out_size: int,
    in_size: int,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    has_bias: bool = False,
) -> float:
    """How far below the largest logit the chosen one lies, in tolerances of the dtype."""
    packed = packed_weight(out_size, in_size, kind=kind, dtype=dtype, device=device, has_bias=has_bias)
    x = torch.randn(num_rows, in_size, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    answer = linear_answer(x, packed)
    chosen = linear.linear_argmax_triton(x, packed).cpu()
    if not bool(((chosen >= 0) & (chosen < out_size)).all()):
        return float("inf")
    largest = answer.amax(dim=-1)
    return error_share(answer.gather(1, chosen[:, None]).squeeze(1), largest, dtype=dtype)


def move_blocks_share(
    num_blocks: int, block_shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> float:
    """0 where gather, scatter and copy move exactly the named blocks, else infinite."""
    generator = torch.Generator().manual_seed(num_blocks)
    elements = torch.Size(block_shape).numel()
    pool = torch.randn(num_blocks, elements + 64, generator=generator).to(dtype).to(device)
    kv = pool[:, :elements].view(num_blocks, *block_shape)
    order = torch.randperm(num_blocks, generator=generator).to(device)
    half = num_blocks // 2
    bytes_of = pool.view(torch.uint8)
    before = bytes_of.clone()
    staging = torch.zeros(num_blocks, *block_shape, dtype=dtype, device=device)
    blocks.gather_blocks_triton(kv, order[:half], staging)
    expected = torch.zeros_like(staging)
    expected[:half] = kv.view(torch.uint8).view(dtype)[order[:half]] if dtype != FP8_DTYPE else expected[:half]
    if dtype == FP8_DTYPE:
        expected.view(torch.uint8)[:half] = kv.view(torch.uint8)[order[:half]]
    exact = torch.equal(staging.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(bytes_of, before)
    blocks.scatter_blocks_triton(kv, order[half : 2 * half], staging)
    width = elements * pool.element_size()
    before[order[half : 2 * half], :width] = before[order[:half], :width]
    exact = exact and torch.equal(bytes_of, before)
    blocks.copy_blocks_triton(kv, order[:1], order[-1:])
    before[order[-1], :width] = before[order[0], :width]
    return 0.0 if exact and torch.equal(bytes_of, before) else float("inf")


def sampling_batch(num_rows: int, *, device: torch.device, seed: int = 0) -> sampling.SamplingBatch:
    """Rows that go round greedy, plain, top-k, top-p, min-p and all of them at once."""
    temperature = [0.0, 0.9, 1.3, 0.7, 1.1, 1.6]
    top_k = [0, 0, 5, 0, -1, 40]
    top_p = [1.0, 1.0, 1.0, 0.6, 1.0, 0.9]
    min_p = [0.0, 0.0, 0.0, 0.0, 0.2, 0.02]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        repeated = (values * (num_rows // len(values) + 1))[:num_rows]
        return torch.tensor(repeated, dtype=dtype, device=device)

    row = torch.arange(num_rows)
    return sampling.SamplingBatch(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seed=(torch.full((num_rows,), 0x1234_5678_9ABC + seed)).to(device),
        stream=((row << 34) + row).to(device),
        step=(row * 7).to(torch.int32).to(device),
    )


def sample_share(num_rows: int, vocabulary: int, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> float:
    """0 where each row's token is the reference's, else infinite. Inputs are such that no two scores are near equal."""
    logits = (4 * torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed))).to(dtype)
    got = sampling.sample_triton(logits.to(device), sampling_batch(num_rows, device=device, seed=seed)).cpu()
    expected = sampling.sample(logits, sampling_batch(num_rows, device=torch.device("cpu"), seed=seed))
    return 0.0 if torch.equal(got, expected) else float("inf")
