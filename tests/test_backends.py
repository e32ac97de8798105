"""A whole fp32 job gives the same tokens on every backend that runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchllm.data.results import query
from batchllm.errors import JobError
from batchllm.job import load_job
from batchllm.kernels.launch import triton
from batchllm.kernels.native import library as native_library
from batchllm.run_job import run_job

REPOSITORY = Path(__file__).resolve().parents[1]
PREFIX = "The engine reads every prompt first and plans the whole batch before it runs. " * 6
WriteBatch = Callable[..., Path]
Answers = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module")
def wide_model(make_chat_model: Callable[..., Path]) -> Path:
    """A chat model with the smallest head that GPU kernels take, and one layer, for the interpreter is slow."""
    return make_chat_model(hidden_size=128, num_heads=2, num_kv_heads=1, num_layers=1)


@pytest.fixture
def write_batch(write_job: Callable[..., Path], wide_model: Path) -> WriteBatch:
    """A function (folder, engine section) -> a job whose rows share more than a chunk of positions, end in different ways, and differ in heat."""

    def write(folder: Path, **engine: Any) -> Path:
        texts = [PREFIX + end for end in (" ", "A row", "A row is never lost", "0 1 2")] + ["alone", "9"]
        return write_job(
            folder,
            {"text": texts, "heat": [0.0, 0.0, 0.9, 0.0, 0.7, 0.0], "length": [3, 1, 4, 5, 2, 3]},
            model=str(wide_model),
            sampling={"max_tokens": {"column": "length"}, "temperature": {"column": "heat"}, "top_k": 20},
            output={"token_ids": True},
            engine={"max_step_tokens": 200, **engine},
        )

    return write


def answers_of(job_file: Path) -> Answers:
    rows = query("select row_index, error, token_ids from completions order by row_index", job_file.parent / "out")
    assert [row["error"] for row in rows.to_pylist()] == [None] * 6
    return {(row["row_index"], 0): row["token_ids"] for row in rows.to_pylist()}


def run_here(job_file: Path) -> Answers:
    assert run_job(load_job(job_file)).finished
    return answers_of(job_file)


def run_with_triton(job_file: Path) -> Answers:
    """In a process of its own, for Triton chooses its interpreter when it is imported."""
    if triton is None:
        pytest.skip("needs triton")
    environment = {"BATCHLLM_KERNELS": "triton", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "batchllm", "run", str(job_file)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return answers_of(job_file)


@pytest.fixture
def expected(write_batch: WriteBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What the plain torch operations say."""
    monkeypatch.setenv("BATCHLLM_KERNELS", "reference")
    answers = run_here(write_batch(tmp_path / "reference"))
    assert [len(answers[row, 0]) for row in range(6)] == [3, 1, 4, 5, 2, 3]
    assert len({tuple(tokens) for tokens in answers.values()}) == 6
    return answers


@pytest.mark.parametrize("path", native_library.PATHS)
def test_the_native_kernels_give_the_tokens_of_the_reference(
    write_batch: WriteBatch, expected: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    library = native_library.load()
    if isinstance(library, str) or path not in library.runnable_paths():
        pytest.skip(f"needs the native kernels' {path} path")
    monkeypatch.setenv("BATCHLLM_KERNELS", "native")
    before = library.path_name()
    library.use_path(path)
    try:
        assert run_here(write_batch(tmp_path / path)) == expected
    finally:
        library.use_path(before)


def test_the_triton_kernels_give_the_tokens_of_the_reference(
    write_batch: WriteBatch, expected: Answers, tmp_path: Path
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert run_with_triton(write_batch(tmp_path / "triton", device=device)) == expected


def test_eight_bit_keys_and_values_change_little_of_what_rows_say(
    write_batch: WriteBatch, expected: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHLLM_KERNELS", "reference")
    kept = run_here(write_batch(tmp_path / "fp8", kv={"dtype": "fp8"}))
    assert kept != expected
    # 3 bits of mantissa change some tokens of a random model, not all.
    assert sum(kept[row][0] == expected[row][0] for row in expected) >= 3


def test_eight_bit_keys_and_values_are_refused_by_name_where_no_kernel_keeps_them(
    write_batch: WriteBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(native_library.load(), str):
        pytest.skip("needs the native kernels")
    monkeypatch.setenv("BATCHLLM_KERNELS", "native")
    with pytest.raises(JobError, match="engine.kv.dtype: fp8 needs a GPU; the native kernels keep keys and values as"):
        run_job(load_job(write_batch(tmp_path, kv={"dtype": "fp8"})))
