"""Every kernel compiles for every device class, in every configuration of the tuning table; no GPU is needed.

The launchers run on meta tensors with their launches recorded instead of enqueued, so what is compiled is what a GPU
would be given.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from batchllm.kernels import activation, attention_triton, blocks, launch, linear, norm, rope, sampling, tuning
from batchllm.kernels.attention import AttentionPlan
from batchllm.kernels.floats import FP8_DTYPE

if launch.triton is None:
    pytest.skip("needs triton", allow_module_level=True)
if launch.is_interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

META = torch.device("meta")
DEVICE_CLASSES = ("sm_80", "sm_90", "sm_100")
HEAD_DIMS = (64, 80, 96, 128, 256)
TENSOR_MEMORY_COLUMNS = 512
# What one program may take; sm_80 stands for consumer devices too.
SHARED_MEMORY_BYTES = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
ELEMENT_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    FP8_DTYPE: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a compiled kernel takes; `stack_bytes` per thread is where spilled registers go."""

    num_registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_memory_columns: int


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def run_attention(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    integers = functools.partial(empty, dtype=torch.int32)
    plan = AttentionPlan(
        positions=integers(32),
        tables=integers(32),
        block_table=integers(8, 64),
        items=integers(9, 6),
        merge_rows=integers(32),
        merge_start=integers(33),
        merge_partials=integers(64),
        num_partials=64,
    )
    scale = empty(4, 2, 8, dtype=torch.float32) if kv_dtype == FP8_DTYPE else None
    query, kv = empty(32, 32, head_dim, dtype=dtype), empty(100, 4, 2, 8, 16, head_dim, dtype=kv_dtype)
    attention_triton.attention_triton(query, kv, layer=3, plan=plan, scale=0.1, kv_scale=scale)


def run_rope(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    rope.rope_write_kv_triton(
        empty(32, 48 * 128, dtype=dtype),
        empty(4096, 128, dtype=torch.float32),
        empty(100, 4, 2, 8, 16, 128, dtype=kv_dtype),
        layer=3,
        positions=empty(32, dtype=torch.int32),
        slots=empty(32, dtype=torch.int64),
        num_heads=32,
        kv_scale=empty(4, 2, 8, dtype=torch.float32) if kv_dtype == FP8_DTYPE else None,
    )


def run_linear(launcher: Callable[..., torch.Tensor], num_rows: int, dtype: torch.dtype, weight: torch.dtype) -> None:
    packed = linear.PackedLinear(
        weight=empty(4096, 2048, dtype=weight),
        bias=None,
        out_size=4096,
        in_size=2048,
        scale=None if weight == dtype else empty(4096, dtype=torch.float32),
    )
    launcher(empty(num_rows, 2048, dtype=dtype), packed)


def add_to_empty(x: torch.Tensor, packed: linear.PackedLinear) -> torch.Tensor:
    out = empty(x.shape[0], packed.out_size, dtype=x.dtype)
    linear.linear_add_triton(x, packed, out)
    return out


def run_sample(dtype: torch.dtype) -> None:
    column = functools.partial(empty, 32)
    batch = sampling.SamplingBatch(
        temperature=column(dtype=torch.float32),
        top_k=column(dtype=torch.int32),
        top_p=column(dtype=torch.float32),
        min_p=column(dtype=torch.float32),
        seed=column(dtype=torch.int64),
        stream=column(dtype=torch.int64),
        step=column(dtype=torch.int32),
    )
    sampling.sample_triton(empty(32, 128256, dtype=dtype), batch)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """A name and a launcher call for each configuration of the table."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for head_dim in HEAD_DIMS:
        for dtype, kv_dtype in ((bf16, bf16), (bf16, FP8_DTYPE), (fp32, fp32)):
            name = f"attention-{head_dim}-{ELEMENT_NAMES[dtype]}-{ELEMENT_NAMES[kv_dtype]}"
            yield name, functools.partial(run_attention, head_dim, dtype, kv_dtype)
    yield "attention-128-fp16-fp16", functools.partial(run_attention, 128, fp16, fp16)
    for num_rows in (16, 64, 256):
        for weight in (torch.int8, FP8_DTYPE):
            call = functools.partial(run_linear, linear.linear_triton, num_rows, bf16, weight)
            yield f"linear-{num_rows}-{ELEMENT_NAMES[weight]}", call
            call = functools.partial(run_linear, add_to_empty, num_rows, bf16, weight)
            yield f"linear_add-{num_rows}-{ELEMENT_NAMES[weight]}", call
        for weight in (bf16, torch.int8, FP8_DTYPE):
            call = functools.partial(run_linear, linear.linear_argmax_triton, num_rows, bf16, weight)
            yield f"argmax-{num_rows}-{ELEMENT_NAMES[weight]}", call
    yield "linear-float", functools.partial(run_linear, linear.linear_triton, 64, fp32, torch.int8)
    yield "argmax-float", functools.partial(run_linear, linear.linear_argmax_triton, 64, fp32, fp32)
    for hidden_size in (1024, 4096, 16384):
        for dtype in (bf16, fp32):
            x = empty(32, hidden_size, dtype=dtype)
            call = functools.partial(norm.rms_norm_triton, x, x[0], eps=1e-5, residual=x)
            yield f"rms_norm-{hidden_size}-{ELEMENT_NAMES[dtype]}", call
    for dtype in (bf16, fp32):
        yield (
            f"silu_mul-{ELEMENT_NAMES[dtype]}",
            functools.partial(activation.silu_mul_triton, empty(32, 8192, dtype=dtype)),
        )
        yield f"rope-{ELEMENT_NAMES[dtype]}", functools.partial(run_rope, dtype, dtype)
        yield f"sample-{ELEMENT_NAMES[dtype]}", functools.partial(run_sample, dtype)
    yield "rope-fp8", functools.partial(run_rope, bf16, FP8_DTYPE)
    kv, ids = empty(100, 4, 2, 8, 16, 128), empty(7, dtype=torch.int64)
    yield "gather", functools.partial(blocks.gather_blocks_triton, kv, ids, kv)
    yield "scatter", functools.partial(blocks.scatter_blocks_triton, kv, ids, kv)
    yield "copy", functools.partial(blocks.copy_blocks_triton, kv, ids, ids)


CASES = dict(cases())


def record(device_class: str, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that `call` makes where its tensors lie on a device of the class."""
    launches: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], *, device: torch.device, arguments: Any, options: Any) -> None:
        launches.append(Launch(kernel=kernel, arguments=arguments, options=options))

    facts = tuning.DeviceFacts(device_class=device_class, num_processors=132, has_e4m3=device_class != "sm_80")
    with monkeypatch.context() as patch:
        for module in (activation, attention_triton, blocks, linear, norm, rope, sampling):
            patch.setattr(module, "launch", note)
        patch.setattr(tuning, "describe_device", lambda device: facts)
        call()
    return launches


def compile_launch(launched: Launch, device_class: str) -> Resources:
    """Specialised as the launch on a GPU would be: ones become constants, multiples of 16 and tensors are marked as
    such."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for number, parameter in enumerate(launched.kernel.params):
        value = launched.arguments[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{ELEMENT_NAMES[value.dtype]}"
            attributes[(number,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launched.kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", int(device_class.partition("_")[2]), 32)
    compiled = triton.compile(source, target=target, options=launch.compiler_options(launched.options))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(
        num_registers=used["REG"],
        stack_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        tensor_memory_columns=getattr(compiled.metadata, "tmem_size", 0) or 0,
    )


@pytest.mark.parametrize("device_class", DEVICE_CLASSES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_fit_the_device_without_spills(case: str, device_class: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record(device_class, CASES[case], monkeypatch)
    assert launches
    for launched in launches:
        resources = compile_launch(launched, device_class)
        print(case, device_class, launched.kernel.__name__, resources)
        assert resources.stack_bytes == 0
        assert resources.shared_bytes <= SHARED_MEMORY_BYTES[device_class]
        assert resources.tensor_memory_columns <= TENSOR_MEMORY_COLUMNS
