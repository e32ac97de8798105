"""Safetensors weights: single and sharded, every tensor accounted for, and no pickle ever opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchllm.errors import ModelError
from batchllm.models.huggingface_config import huggingface_config
from batchllm.models.safetensors_weights import SafetensorsWeights
from batchllm.models.weights import canonical_shapes


def opened(folder: Path) -> SafetensorsWeights:
    return SafetensorsWeights(folder, huggingface_config(folder))


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors[name.replace("__", ".")] = tensor
    kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_every_tensor_is_that_of_the_reference(save_tiny: Callable[..., Any]) -> None:
    model, source = save_tiny("qwen2")
    weights = opened(source.path)
    state = model.state_dict()
    assert len(canonical_shapes(huggingface_config(source.path))) == len(state)
    assert torch.equal(weights.read("layers.1.k_bias", torch.float32), state["model.layers.1.self_attn.k_proj.bias"])
    assert torch.equal(weights.read("layers.2.down", torch.float32), state["model.layers.2.mlp.down_proj.weight"])
    assert torch.equal(weights.read("lm_head", torch.bfloat16), state["lm_head.weight"].bfloat16())


def test_a_sharded_folder_gives_the_same_tensors(save_tiny: Callable[..., Any]) -> None:
    model, source = save_tiny("llama3", max_shard_size="100KB")
    assert len(list(source.path.glob("*.safetensors"))) > 2
    weights = opened(source.path)
    for name in ("embed", "layers.2.q", "lm_head"):
        assert weights.read(name, torch.float32).shape == canonical_shapes(huggingface_config(source.path))[name]
    assert torch.equal(weights.read("embed", torch.float32), model.state_dict()["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "shard", ["../model-x.safetensors", "/etc/passwd", "gone.safetensors", "pytorch_model.bin", 7, ["x"]]
)
def test_an_index_that_points_elsewhere_or_at_nothing_is_refused(shard: Any, save_tiny: Callable[..., Any]) -> None:
    _, source = save_tiny("llama2", max_shard_size="100KB")
    index = source.path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="is not the name of a safetensors file|gone.safetensors is missing"):
        opened(source.path)


def test_missing_unknown_and_misshapen_tensors_are_refused_by_name(save_tiny: Callable[..., Any]) -> None:
    _, source = save_tiny("llama2")
    change(source.path, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match="missing tensor model.layers.1.mlp.up_proj.weight"):
        opened(source.path)
    change(source.path, model__layers__1__mlp__up_proj__weight=torch.ones(112, 63))
    with pytest.raises(ModelError, match=r"up_proj.weight has shape \[112, 63\], the config asks for \[112, 64\]"):
        opened(source.path)
    change(source.path, model__layers__1__mlp__up_proj__weight=torch.ones(112, 64), model__extra=torch.ones(2))
    with pytest.raises(ModelError, match="unknown tensor model.extra"):
        opened(source.path)


def test_frequencies_that_old_checkpoints_carry_are_passed_over(save_tiny: Callable[..., Any]) -> None:
    _, source = save_tiny("llama2")
    change(source.path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    opened(source.path)


def test_a_tied_model_may_store_its_head_only_if_it_is_the_embedding(save_tiny: Callable[..., Any]) -> None:
    model, source = save_tiny("llama-tied")
    embed = model.state_dict()["model.embed_tokens.weight"]
    change(source.path, lm_head__weight=embed.clone())
    assert torch.equal(opened(source.path).read("embed", torch.float32), embed)
    change(source.path, lm_head__weight=embed + 1)
    with pytest.raises(ModelError, match="lm_head.weight differs from model.embed_tokens.weight"):
        opened(source.path)


def test_an_untied_model_without_its_head_is_refused(save_tiny: Callable[..., Any]) -> None:
    _, source = save_tiny("llama2")
    change(source.path, lm_head__weight=None)
    with pytest.raises(ModelError, match="missing tensor lm_head.weight"):
        opened(source.path)


def test_integer_weights_are_refused_by_name(save_tiny: Callable[..., Any]) -> None:
    _, source = save_tiny("llama2")
    change(source.path, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(ModelError, match="tensor model.norm.weight has type I8; F32, F16, BF16 are read"):
        opened(source.path)


@pytest.mark.parametrize("size", [0, 4, 900, 100_000])
def test_a_file_that_is_cut_short_is_one_line(size: int, save_tiny: Callable[..., Any]) -> None:
    _, source = save_tiny("llama2")
    os.truncate(source.path / "model.safetensors", size)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file") as caught:
        opened(source.path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "model.pth"])
def test_pickled_weights_are_never_opened(name: str, save_tiny: Callable[..., Any], tmp_path: Path) -> None:
    _, source = save_tiny("llama2")
    witness = tmp_path / "ran"
    # A pickle, written by hand, that would make the file `ran` if anything loaded it.
    planted = b"cos\nsystem\n(S'touch " + str(witness).encode() + b"'\ntR."
    (source.path / name).write_bytes(planted)
    opened(source.path)
    (source.path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"only pickled weights .{name}.*convert them to safetensors"):
        opened(source.path)
    assert not witness.exists()
    assert (source.path / name).read_bytes() == planted
