"""GGUF weights: exact against a dequantiser written apart, rows of q and k in order, every tensor accounted for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from batchllm.errors import ModelError
from batchllm.models import gguf_weights
from batchllm.models.gguf_config import gguf_config
from batchllm.models.gguf_file import read_gguf
from batchllm.models.gguf_weights import GgufWeights
from batchllm.models.source import ModelSource

NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight"}
PARTS = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def opened(path: Path) -> GgufWeights:
    file = read_gguf(path)
    return GgufWeights(file, gguf_config(file))


def test_all_272_tensors_equal_the_oracle_with_no_error_at_all(
    embedded_model: ModelSource, oracle_tensors: dict[str, torch.Tensor]
) -> None:
    weights = opened(embedded_model.path)
    names = dict(NAMES)
    for layer in range(30):
        names |= {f"layers.{layer}.{part}": f"blk.{layer}.{theirs}.weight" for part, theirs in PARTS.items()}
    assert len(names) == len(oracle_tensors) == 272
    for ours, theirs in names.items():
        expected = oracle_tensors[theirs]
        part = ours.rpartition(".")[2]
        if part in ("q", "k"):
            # Head by head: row 2 i + s of the file is row i + 32 s.
            num_heads = 9 if part == "q" else 3
            rows = [64 * head + 2 * (row % 32) + row // 32 for head in range(num_heads) for row in range(64)]
            expected = expected[rows]
        assert torch.equal(weights.read(ours, torch.float32), expected), ours


def test_a_tensor_read_in_bf16_is_the_float32_one_rounded_once(embedded_model: ModelSource) -> None:
    weights = opened(embedded_model.path)
    whole = weights.read("layers.3.down", torch.float32)
    assert torch.equal(weights.read("layers.3.down", torch.bfloat16), whole.to(torch.bfloat16))


def test_slices_of_any_size_give_the_same_tensor(embedded_model: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = opened(embedded_model.path)
    whole = weights.read("layers.0.k", torch.float32)
    monkeypatch.setattr(gguf_weights, "_SLICE_ELEMENTS", 576 * 7)
    assert torch.equal(weights.read("layers.0.k", torch.float32), whole)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.1.attn_q.weight", "blk.2.ffn_norm.weight", "output_norm.weight"]
)
def test_a_file_without_one_tensor_is_refused_by_its_name(
    name: str, tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama-tied"), tensors={name: None})
    with pytest.raises(ModelError, match=rf"tiny\.gguf: .*{name}"):
        opened(tmp_path / "tiny.gguf")


def test_a_file_with_a_tensor_too_many_is_refused_by_its_name(
    tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama2"), tensors=extra)
    with pytest.raises(ModelError, match="unknown tensor blk.0.attn_q_norm.weight"):
        opened(tmp_path / "tiny.gguf")


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(
    tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    wrong = {"blk.0.attn_k.weight": np.ones((32, 64), np.float32)}
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama2"), tensors=wrong)
    with pytest.raises(ModelError, match=r"blk.0.attn_k.weight has shape \[32, 64\], the config asks for \[64, 64\]"):
        opened(tmp_path / "tiny.gguf")


def test_a_type_that_holds_no_weights_is_refused_by_name(
    tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama2"))
    file = read_gguf(tmp_path / "tiny.gguf")
    config = gguf_config(file)
    path = tmp_path / "tiny.gguf"
    content = bytearray(path.read_bytes())
    # The type of a tensor lies behind its name and two dimensions.
    at = content.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4 + 16
    assert content[at] == gguf.GGMLQuantizationType.F32
    content[at] = gguf.GGMLQuantizationType.I32
    path.write_bytes(content)
    weights = GgufWeights(read_gguf(path), config)
    with pytest.raises(ModelError, match="blk.0.attn_k.weight: type I32 cannot be read"):
        weights.read("layers.0.k", torch.float32)
