"""Where the Triton kernels are picked, and what is said where they cannot run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from batchllm import ops
from batchllm.errors import JobError
from batchllm.kernels import launch


def test_asking_for_triton_on_a_cpu_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    if launch.is_interpreted():
        pytest.skip("the interpreter runs Triton kernels on a CPU")
    monkeypatch.setenv("BATCHLLM_KERNELS", "triton")
    with pytest.raises(JobError, match="BATCHLLM_KERNELS=triton: needs .*; the job's device is cpu"):
        ops.select_kernels(torch.device("cpu"))


def test_launching_where_triton_cannot_run_says_so() -> None:
    if launch.is_interpreted():
        pytest.skip("the interpreter runs Triton kernels on a CPU")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 runs an installed Triton anywhere"):
        launch.launch(None, (1,), device=torch.device("cpu"), arguments={}, options={})


@pytest.mark.triton
def test_asking_for_triton_gives_every_operation_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHLLM_KERNELS", "triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = ops.select_kernels(device)
    assert kernels.name == "triton"
    gate_up = torch.tensor([[0.0, 2.0, 3.0, 4.0]], device=device)
    assert torch.allclose(kernels.silu_mul(gate_up), ops.REFERENCE.silu_mul(gate_up))


@pytest.mark.triton
def test_a_head_size_that_triton_is_not_tuned_for_is_named_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setenv("BATCHLLM_KERNELS", "triton")
    assert ops.select_kernels(device, head_dim=80).name == "triton"
    with pytest.raises(JobError, match="tuned for head dims 64, 80, 96, 128, 256, and the model's is 100"):
        ops.select_kernels(device, head_dim=100)


def test_references_import_and_run_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from batchllm import ops
from batchllm.kernels import launch
assert launch.triton is None and not launch.can_run(torch.device("cuda"))
print(ops.REFERENCE.silu_mul(torch.tensor([[0.0, 2.0]])).tolist())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "[[0.0]]\n", done.stderr


def test_triton_is_not_imported_where_no_device_can_run_it() -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU here runs Triton")
    program = "import sys; from batchllm import ops; print('triton' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "False\n", done.stderr
