"""How the native library is built, found, forced to a path, and that it brings no OpenMP runtime of its own."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchllm import ops
from batchllm.errors import JobError
from batchllm.kernels.attention import AttentionPlan
from batchllm.kernels.native import library as native_library
from batchllm.kernels.native import operations
from batchllm.kernels.native.library import Library
from batchllm.kernels.native.source_digest import source_digest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def library() -> Library:
    loaded = native_library.load()
    if isinstance(loaded, str):
        pytest.skip(f"native kernels: {loaded}")
    return loaded


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # The package that this process has, which may be a build of its own.
    variables = {**os.environ, "PYTHONPATH": str(Path(ops.__file__).parents[1]), **environment}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def build_in_copy(folder: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    """Builds from a copy of the tree's build files into `folder`/out."""
    for name in ("pyproject.toml", "setup.py", "kernels", "batchllm"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "README.md").write_text("# x\n")
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", "out", "--build-temp", "temp"],
        cwd=folder,
        env={**os.environ, "CXX": compiler},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_best_path_of_the_processor_runs_unless_one_is_asked_for(library):
    code = "from batchllm.kernels.native.library import load; print(load().path_name())"
    assert run_python(code, BATCHLLM_NATIVE_PATH="").stdout.strip() == library.runnable_paths()[-1]


@pytest.mark.parametrize("path", native_library.PATHS)
def test_the_environment_forces_each_path(library, path):
    code = (
        "import torch; from batchllm import ops; from batchllm.kernels.native.library import load; "
        "k = ops.select_kernels(torch.device('cpu')); x = torch.ones(3, 40).bfloat16(); "
        "print(k.name, load().path_name(), int(k.linear(x, k.pack_linear(x)).sum()))"
    )
    done = run_python(code, BATCHLLM_NATIVE_PATH=path)
    if path in library.runnable_paths():
        assert done.stdout.split() == ["native", path, str(3 * 3 * 40)]
    else:
        assert "this processor cannot run it" in done.stderr


def test_an_unknown_path_is_refused_with_the_paths_named(library):
    done = run_python(
        "import torch; from batchllm import ops; ops.select_kernels(torch.device('cpu'))", BATCHLLM_NATIVE_PATH="sse9"
    )
    assert "JobError: BATCHLLM_NATIVE_PATH=sse9: sse9: no such native path" in done.stderr


def test_a_path_that_the_processor_lacks_is_refused(library):
    lacking = [path for path in native_library.PATHS if path not in library.runnable_paths()]
    if not lacking:
        pytest.skip("this processor has every path")
    with pytest.raises(ValueError, match="this processor cannot run it"):
        library.use_path(lacking[0])


def test_only_one_openmp_runtime_is_loaded_and_it_is_torchs(library):
    code = (
        "import torch; from batchllm import ops; k = ops.native_kernels(); x = torch.ones(64, 512); "
        "k.linear(x, k.pack_linear(x)); x @ x.T\n"
        "from batchllm.kernels.native.library import loaded_openmp_runtimes; print(*loaded_openmp_runtimes(), sep='\\n')"
    )
    runtimes = run_python(code).stdout.split()
    assert len(runtimes) == 1
    assert "torch" in Path(runtimes[0]).parts


def test_the_library_names_no_openmp_runtime_of_its_own(library):
    content = native_library.LIBRARY_FILE.read_bytes()
    assert b"GOMP_parallel" in content
    assert b"libgomp.so" not in content


def test_torchs_number_of_threads_is_the_kernels(library):
    before = torch.get_num_threads()
    try:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            assert library.num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_native_kernels_run_by_default_where_they_were_built(library, monkeypatch):
    monkeypatch.delenv(ops.ENVIRONMENT_VARIABLE, raising=False)
    assert ops.select_kernels(torch.device("cpu")).name == "native"
    monkeypatch.setenv(ops.ENVIRONMENT_VARIABLE, "reference")
    assert ops.select_kernels(torch.device("cpu")).name == "reference"


def test_without_the_library_the_reference_runs_and_the_reason_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(native_library, "LIBRARY_FILE", tmp_path / "libbatchllm_native.so")
    monkeypatch.delenv(ops.ENVIRONMENT_VARIABLE, raising=False)
    native_library.load.cache_clear()
    try:
        assert (
            native_library.load()
            == "not built: libbatchllm_native.so is missing, the install found no working C++ compiler"
        )
        assert ops.select_kernels(torch.device("cpu")).name == "reference"
        monkeypatch.setenv(ops.ENVIRONMENT_VARIABLE, "native")
        with pytest.raises(JobError, match="BATCHLLM_KERNELS=native: not built"):
            ops.select_kernels(torch.device("cpu"))
    finally:
        native_library.load.cache_clear()


def test_a_damaged_library_is_a_reason_and_no_crash(monkeypatch, tmp_path):
    damaged = tmp_path / "libbatchllm_native.so"
    damaged.write_bytes(b"no library")
    monkeypatch.setattr(native_library, "LIBRARY_FILE", damaged)
    native_library.load.cache_clear()
    try:
        assert str(native_library.load()).startswith("cannot be loaded: ")
    finally:
        native_library.load.cache_clear()


@pytest.mark.skipif(platform.system() != "Linux", reason="needs Linux")
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_the_build_goes_on_without_a_working_compiler(tmp_path, compiler):
    done = build_in_copy(tmp_path, compiler)
    assert done.returncode == 0, done.stderr
    assert "native kernels not built, the torch reference will run" in done.stdout + done.stderr
    assert not list(tmp_path.glob("out/**/*.so"))


def test_tensors_that_do_not_fit_are_refused_by_name(library):
    packed = operations.pack_linear(torch.randn(8, 16))
    with pytest.raises(ValueError, match=r"x must be \[num_rows, 16\]"):
        operations.linear(torch.randn(2, 15), packed)
    with pytest.raises(ValueError, match="one type a call"):
        operations.linear(torch.randn(2, 16).bfloat16(), packed)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        operations.silu_mul(torch.randn(2, 16).half())
    kv = torch.randn(2, 1, 2, 1, 4, 8)
    with pytest.raises(ValueError, match="block ids must be int64 below 2"):
        operations.gather_blocks(kv, torch.tensor([2]), torch.empty_like(kv))
    with pytest.raises(ValueError, match="staging of 2 blocks for 3"):
        operations.scatter_blocks(kv, torch.tensor([0, 1, 0]), torch.empty_like(kv))


def test_shapes_that_would_be_read_beyond_their_end_are_refused(library):
    x = torch.randn(3, 16)
    refused = {
        "weight: must have 16": lambda: operations.rms_norm(x, torch.ones(15), eps=1e-5),
        "weight: must be contiguous": lambda: operations.rms_norm(x, torch.ones(32)[::2], eps=1e-5),
        r"residual: must be \(3, 16\)": lambda: operations.rms_norm(x, torch.ones(16), eps=1e-5, residual=x[:2]),
        "must have two halves": lambda: operations.silu_mul(torch.randn(2, 15)),
        "bias: must have 8 numbers": lambda: operations.pack_linear(torch.randn(8, 16), torch.ones(7)),
    }
    for match, call in refused.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_rows_that_do_not_fit_their_pool_or_plan_are_refused(library):
    kv, cos_sin = torch.randn(2, 1, 2, 1, 4, 8), torch.randn(9, 8)
    places = {"positions": torch.zeros(3, dtype=torch.int32), "slots": torch.arange(3)}

    def rope(width=24, **changed):
        qkv = torch.randn(3, width)
        operations.rope_write_kv(qkv, cos_sin, kv, layer=0, num_heads=1, **{**places, **changed})

    rope()
    for match, changed in {
        "23 numbers for 1": {"width": 23},
        "2 slots and 3 positions": {"slots": torch.arange(2)},
        "3 slots and 2 positions": {"positions": torch.zeros(2, dtype=torch.int32)},
    }.items():
        with pytest.raises(ValueError, match=match):
            rope(**changed)
    plan = AttentionPlan(
        positions=places["positions"],
        tables=torch.zeros(3, dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        items=torch.tensor([[0, 3, 0, 1, 1, -1]], dtype=torch.int32),
        merge_rows=torch.empty(0, dtype=torch.int32),
        merge_start=torch.zeros(1, dtype=torch.int32),
        merge_partials=torch.empty(0, dtype=torch.int32),
        num_partials=0,
    )

    def attention(*, heads=(1, 8), **changed):
        query = torch.randn(3, *heads)
        operations.attention(query, kv, layer=0, plan=dataclasses.replace(plan, **changed), scale=1.0)

    attention()
    for match, changed in {
        "1 heads of 16 over": {"heads": (1, 16)},
        "items must be int32": {"items": plan.items.long()},
        "tables must be int32 and contiguous": {"tables": torch.zeros(6, dtype=torch.int32)[::2]},
        "2 positions, 3 tables": {"positions": plan.positions[:2]},
        r"items \(1, 5\)": {"items": plan.items[:, :5].contiguous()},
    }.items():
        with pytest.raises(ValueError, match=match):
            attention(**changed)


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "a.cpp").write_text("int a;")
    digest = source_digest(folder)
    (folder / "a.cpp").write_text("int b;")
    assert source_digest(folder) != digest
    (folder / "a.cpp").unlink()
    assert source_digest(folder) is None
