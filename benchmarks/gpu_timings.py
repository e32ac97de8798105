"""What each kernel takes at the shapes of Llama-3-8B, beside its floor and beside torch's own operation.

A floor is the larger of the bytes that must move over the measured copy bandwidth and of the FLOPs over the measured
bfloat16 matrix rate. Times are medians of `NUM_RUNS`, each from an emptied second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import kernel_cases
import torch
import torch.nn.functional as F
from attention_cases import AttentionShape, attention_plan

from batchllm.kernels import activation, attention_triton, blocks, linear, norm, rope, sampling
from batchllm.kernels.floats import FP8_DTYPE

NUM_RUNS = 20
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 4096, 32, 8, 128, 14336, 128256
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured on this device: a plain copy (bytes read plus written a second), a bfloat16 product, the host link."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    host_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """`run` is the kernel; `torch_run` torch's own operation, None where it has none. `moved_bytes` at least."""

    name: str
    run: Callable[[], object]
    torch_run: Callable[[], object] | None
    moved_bytes: float
    flops: float = 0.0
    over_host_link: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    name: str
    kernel_s: float
    floor_s: float
    torch_s: float | None

    @property
    def share(self) -> float:
        """How much of the physical limit is reached."""
        return self.floor_s / self.kernel_s


def measure(run: Callable[[], object], *, num_runs: int = NUM_RUNS) -> float:
    """Median seconds of one call on the device."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for number in range(num_runs + 3):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        # The first calls compile and allocate.
        if number >= 3:
            times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2]


def measure_rates() -> Rates:
    size = 2 << 30
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    return Rates(
        copy_bytes_per_s=2 * size / measure(lambda: target.copy_(source)),
        matmul_flops_per_s=2 * 8192**3 / measure(lambda: square @ square),
        host_bytes_per_s=pinned.numel() / measure(lambda: pinned.copy_(source[: pinned.numel()], non_blocking=True)),
    )


def time_cases(rates: Rates) -> list[Timing]:
    """All cases, one after the other; each one's tensors are freed before the next."""
    timings = []
    for make in CASES:
        for case in make():
            bandwidth = rates.host_bytes_per_s if case.over_host_link else rates.copy_bytes_per_s
            timings.append(
                Timing(
                    name=case.name,
                    kernel_s=measure(case.run),
                    floor_s=max(case.moved_bytes / bandwidth, case.flops / rates.matmul_flops_per_s),
                    torch_s=None if case.torch_run is None else measure(case.torch_run),
                )
            )
    return timings


def attention_case(
    name: str,
    shape: AttentionShape,
    *,
    flops: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Case:
    """Sequences over random blocks; torch's own reads the same keys and values laid out whole, which a pool has not."""
    num_sequences, shared = len(shape.kv_lengths), shape.shared_length // BLOCK_SIZE
    length, num_rows = shape.kv_lengths[0], shape.query_lengths[0]
    blocks_each = -(-length // BLOCK_SIZE)
    num_blocks = shared + num_sequences * (blocks_each - shared)
    order = torch.randperm(num_blocks).to(torch.int32)
    tails = order[shared:].view(num_sequences, blocks_each - shared)
    table = torch.cat([order[:shared].expand(num_sequences, shared), tails], dim=1)
    kv = torch.randn(num_blocks, 1, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim, dtype=dtype, device="cuda")
    if kv_dtype is not None:
        kv = kv.to(kv_dtype)
    kv_scale = torch.ones(1, 2, shape.num_kv_heads, device="cuda") if kv_dtype == FP8_DTYPE else None
    query = torch.randn(num_sequences * num_rows, shape.num_heads, shape.head_dim, dtype=dtype, device="cuda")
    plan = attention_plan(shape, table=table, device=torch.device("cuda"))
    dense_query = query.view(num_sequences, num_rows, shape.num_heads, shape.head_dim).transpose(1, 2).contiguous()
    keys, values = torch.randn(2, num_sequences, shape.num_kv_heads, length, shape.head_dim, dtype=dtype, device="cuda")
    scale = shape.head_dim**-0.5
    return Case(
        name=name,
        run=lambda: attention_triton.attention_triton(query, kv, layer=0, plan=plan, scale=scale, kv_scale=kv_scale),
        torch_run=lambda: F.scaled_dot_product_attention(
            dense_query, keys, values, is_causal=num_rows == length, enable_gqa=True
        ),
        moved_bytes=kv.numel() * kv.element_size() + 2 * query.numel() * query.element_size(),
        flops=flops,
    )


def attention_cases() -> Iterator[Case]:
    decode = AttentionShape((1024,) * 256, (1,) * 256, HEADS, KV_HEADS, HEAD_DIM, num_layers=1)
    yield attention_case("attention decode 256 x 1024", decode)
    yield attention_case("attention decode 256 x 1024, fp8 KV", decode, kv_dtype=FP8_DTYPE)
    long = AttentionShape((32768,) * 8, (1,) * 8, HEADS, KV_HEADS, HEAD_DIM, layout="split", num_layers=1)
    yield attention_case("attention decode 8 x 32768, split", long)
    shared = AttentionShape(
        (1088,) * 64, (1,) * 64, HEADS, KV_HEADS, HEAD_DIM, layout="shared", shared_length=1024, num_layers=1
    )
    yield attention_case("attention decode 64 x (1024 shared + 64)", shared)
    prefill = AttentionShape((2048,) * 4, (2048,) * 4, HEADS, KV_HEADS, HEAD_DIM, num_layers=1)
    yield attention_case("attention prefill 4 x 2048", prefill, flops=4 * HEADS * HEAD_DIM * 4 * 2048 * 2049 / 2)


def linear_cases() -> Iterator[Case]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    for num_rows in (16, 64, 256, 4096):
        x = torch.randn(num_rows, HIDDEN, dtype=dtype, device=device)
        plain = kernel_cases.packed_weight(
            INTERMEDIATE, HIDDEN, kind="plain", dtype=dtype, device=device, has_bias=False
        )
        for kind in ("plain", "int8", "fp8"):
            packed = kernel_cases.packed_weight(
                INTERMEDIATE, HIDDEN, kind=kind, dtype=dtype, device=device, has_bias=False
            )
            yield Case(
                name=f"linear {kind}, {num_rows} rows",
                run=lambda x=x, packed=packed: linear.linear_triton(x, packed),
                torch_run=lambda x=x, plain=plain: F.linear(x, plain.weight),
                moved_bytes=packed.weight.numel() * packed.weight.element_size()
                + num_rows * (HIDDEN + INTERMEDIATE) * 2,
                flops=2.0 * num_rows * HIDDEN * INTERMEDIATE,
            )
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, device=device)
    packed = linear.pack_linear(weight)
    x = torch.randn(256, HIDDEN, dtype=dtype, device=device)
    yield Case(
        name="linear argmax, 256 rows",
        run=lambda: linear.linear_argmax_triton(x, packed),
        torch_run=lambda: F.linear(x, weight).argmax(dim=-1),
        moved_bytes=weight.numel() * 2 + x.numel() * 2,
        flops=2.0 * 256 * HIDDEN * VOCABULARY,
    )


def row_cases() -> Iterator[Case]:
    device, dtype, num_rows = torch.device("cuda"), torch.bfloat16, 8192
    x, residual = torch.randn(2, num_rows, HIDDEN, dtype=dtype, device=device)
    weight = torch.ones(HIDDEN, dtype=dtype, device=device)
    yield Case(
        name="rms_norm with residual, 8192 rows",
        run=lambda: norm.rms_norm_triton(x, weight, eps=1e-5, residual=residual),
        torch_run=lambda: F.rms_norm(residual.add_(x), (HIDDEN,), weight, 1e-5),
        moved_bytes=4 * x.numel() * 2,
    )
    gate_up = torch.randn(num_rows, 2 * INTERMEDIATE, dtype=dtype, device=device)
    yield Case(
        name="silu_mul, 8192 rows",
        run=lambda: activation.silu_mul_triton(gate_up),
        torch_run=lambda: activation.silu_mul(gate_up),
        moved_bytes=1.5 * gate_up.numel() * 2,
    )
    qkv = torch.randn(num_rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype, device=device)
    cos_sin = torch.randn(4096, HEAD_DIM, device=device)
    kv = torch.empty(num_rows // BLOCK_SIZE, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype, device=device)
    positions = torch.randint(0, 4096, (num_rows,), dtype=torch.int32, device=device)
    slots = torch.randperm(num_rows, device=device)
    arguments = {"layer": 0, "positions": positions, "slots": slots, "num_heads": HEADS}
    yield Case(
        name="rope_write_kv, 8192 rows",
        run=lambda: rope.rope_write_kv_triton(qkv, cos_sin, kv, **arguments),
        torch_run=lambda: rope.rope_write_kv(qkv, cos_sin, kv, **arguments),
        moved_bytes=2 * qkv.numel() * 2,
    )


def block_cases() -> Iterator[Case]:
    """Blocks of Llama-3-8B, 2 MiB over its 32 layers."""
    kv = torch.empty(512, 32, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    ids = torch.randperm(512, device="cuda")[:128]
    on_device = torch.empty_like(kv[:128])
    pinned = torch.empty(kv[:128].shape, dtype=kv.dtype, pin_memory=True)
    moved = on_device.numel() * 2
    yield Case(
        name="gather 128 blocks on the device",
        run=lambda: blocks.gather_blocks_triton(kv, ids, on_device),
        torch_run=lambda: blocks.gather_blocks(kv, ids, on_device),
        moved_bytes=2 * moved,
    )
    for name, move in (("gather", blocks.gather_blocks_triton), ("scatter", blocks.scatter_blocks_triton)):
        yield Case(
            name=f"{name} 128 blocks, pinned host memory",
            run=lambda move=move: move(kv, ids, pinned),
            torch_run=lambda: pinned.copy_(on_device, non_blocking=True),
            moved_bytes=moved,
            over_host_link=True,
        )


def sampling_cases() -> Iterator[Case]:
    logits = 4 * torch.randn(256, VOCABULARY, device="cuda")
    for name, row in (("greedy", 0), ("plain", 1), ("top-k", 2), ("top-p", 3), ("all filters", 5)):
        every = kernel_cases.sampling_batch(6 * 256, device=torch.device("cuda"))
        columns = {field: getattr(every, field)[row::6].contiguous() for field in sampling.SamplingBatch.__slots__}
        batch = sampling.SamplingBatch(**columns)
        yield Case(
            name=f"sample {name}, 256 rows",
            run=lambda batch=batch: sampling.sample_triton(logits, batch),
            torch_run=lambda: torch.multinomial(logits.softmax(dim=-1), 1),
            moved_bytes=logits.numel() * 4,
        )


CASES = (attention_cases, linear_cases, row_cases, block_cases, sampling_cases)
