"""Config from GGUF metadata: what is read, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchllm.errors import ModelError
from batchllm.models.config import ModelConfig
from batchllm.models.gguf_config import gguf_config
from batchllm.models.gguf_file import read_gguf
from batchllm.models.source import ModelSource, read_config


@pytest.fixture
def config_with(
    tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None]
) -> Callable[..., ModelConfig]:
    def read(**options: Any) -> ModelConfig:
        write_gguf(tmp_path / "tiny.gguf", tiny_model("llama-tied"), **options)
        return gguf_config(read_gguf(tmp_path / "tiny.gguf"))

    return read


def test_the_embedded_model_has_the_sizes_of_smollm2_135m(embedded_model: ModelSource) -> None:
    config = read_config(embedded_model)
    assert (config.architecture, config.num_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        30,
        576,
        1536,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.max_context, config.rms_eps, config.rope.theta) == (8192, 1e-5, 100000.0)
    assert config.tied_embeddings and not config.qkv_bias
    assert (config.bos_id, config.eos_ids) == (1, frozenset({2}))


def test_eos_eot_and_eom_are_all_eos(config_with: Callable[..., ModelConfig]) -> None:
    config = config_with(metadata={"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9})
    assert config.eos_ids == frozenset({2, 7, 9})


def test_a_sliding_window_cuts_the_context_and_says_so(config_with: Callable[..., ModelConfig]) -> None:
    config = config_with(metadata={"llama.attention.sliding_window": 128})
    assert config.max_context == 128
    assert "sliding window of 128 tokens" in config.notes[0]
    assert config_with(metadata={"llama.attention.sliding_window": 4096}).notes == ()


def test_linear_rope_scaling_is_read(config_with: Callable[..., ModelConfig]) -> None:
    scaled = config_with(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert scaled.rope.linear_factor == 4.0
    assert config_with(metadata={"llama.rope.scaling.type": "none"}).rope.linear_factor == 1.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma2"}, "architecture 'gemma2' is not supported; known: llama, qwen2"),
        ({"llama.expert_count": 8}, "llama.expert_count 8: mixtures of experts"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8 differs from the head size 16"),
        ({"llama.attn_logit_softcapping": 30.0}, "llama.attn_logit_softcapping is not known here"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is not known here"),
        ({"llama.attention.causal": False}, "llama.attention.causal is off"),
        ({"llama.attention.head_count_kv": [1, 1, 1]}, "llama.attention.head_count_kv is .*one whole number"),
        ({"llama.block_count": None}, "llama.block_count is None"),
        ({"llama.attention.head_count": 0}, "num_heads is 0"),
        ({"llama.context_length": 1 << 31}, "a context of 2147483648 tokens"),
        ({"llama.block_count": 1_000_000}, "1000000 layers"),
        (
            {"llama.vocab_size": (1 << 31) - 1},
            "llama.vocab_size 2147483647 differs from the 260 rows of token_embd.weight",
        ),
        ({"llama.vocab_size": 259}, "llama.vocab_size 259 differs from the 260 rows of token_embd.weight"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(
    metadata: dict[str, Any], message: str, config_with: Callable[..., ModelConfig]
) -> None:
    with pytest.raises(ModelError, match=message):
        config_with(metadata=metadata)


def test_rope_divisors_that_are_no_numbers_or_of_another_count_are_refused(
    config_with: Callable[..., ModelConfig],
) -> None:
    with pytest.raises(ModelError, match="not a positive number"):
        config_with(tensors={"rope_freqs.weight": np.array([1.0] * 7 + [np.nan], np.float32)})
    with pytest.raises(ModelError, match="5 rope factors for head_dim 16"):
        config_with(tensors={"rope_freqs.weight": np.ones(5, np.float32)})
