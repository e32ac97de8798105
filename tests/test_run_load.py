"""A model that loads beside the run: the same decoder, its errors where the run waits for it, and no more work once given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchllm.errors import ModelError
from batchllm.models.loading import load_decoder
from batchllm.models.source import ModelSource
from batchllm.models.weights import LoadGivenUp, WeightsUntil
from batchllm.ops import select_kernels
from batchllm.run_load import DecoderLoad

CPU = torch.device("cpu")


def started(folder: Path) -> DecoderLoad:
    source = ModelSource("huggingface", folder, "tiny")
    return DecoderLoad(
        source, dtype=torch.float32, device=CPU, int8_parts=frozenset(), kv_dtype="auto", fingerprint="known"
    )


def test_the_decoder_computes_what_one_that_is_loaded_in_place_does(tiny_model: Path) -> None:
    num_threads = torch.get_num_threads()
    loaded = started(tiny_model).wait()
    kernels = select_kernels(CPU, head_dim=loaded.config.head_dim)
    here = load_decoder(
        ModelSource("huggingface", tiny_model, "tiny"), dtype=torch.float32, device=CPU, kernels=kernels
    )
    hidden = torch.randn(3, loaded.config.hidden_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded.logits(hidden), here.logits(hidden))
    assert loaded.fingerprint == "known" and len(here.fingerprint) == 32
    assert torch.get_num_threads() == num_threads


def test_weights_that_cannot_be_read_are_an_error_where_the_run_waits(tiny_model: Path) -> None:
    weights = tiny_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    load = started(tiny_model)
    with pytest.raises(ModelError, match="model.safetensors"):
        load.wait()


def test_a_run_on_the_slow_reference_says_why(
    commands: Any, make_chat_model: Callable[..., Path], write_job: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_chat_model(hidden_size=60, num_heads=3, num_kv_heads=1)
    job = write_job(tmp_path, {"text": ["one"]}, model=str(model))
    note = "the reference kernels run, many times slower than others: head_dim 20 is not a multiple of 8 up to 256"
    ended = commands.run("run", job, folder=tmp_path)
    assert ended.code == 0 and note in ended.stderr
    asked = commands.run(
        "run",
        job,
        "--set",
        "seed=1",
        "--set",
        "output.path=other",
        folder=tmp_path,
        environment={"BATCHLLM_KERNELS": "reference"},
    )
    assert asked.code == 0 and "reference kernels" not in asked.stderr


def test_a_load_that_nobody_waits_for_leaves_no_thread_and_no_error(tiny_model: Path) -> None:
    (tiny_model / "model.safetensors").write_bytes(b"no weights")
    load = started(tiny_model)
    load.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]


def test_weights_are_read_until_the_load_is_given_up() -> None:
    class Ones:
        def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.ones(2, dtype=dtype)

    given_up = threading.Event()
    weights = WeightsUntil(Ones(), given_up.is_set)
    assert weights.read("embed", torch.float32).tolist() == [1.0, 1.0]
    given_up.set()
    with pytest.raises(LoadGivenUp):
        weights.read("embed", torch.float32)
