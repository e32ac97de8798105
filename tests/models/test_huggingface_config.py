"""Config from config.json: what is read, what is ignored as harmless, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchllm.errors import ModelError
from batchllm.models.config import Llama3Scaling
from batchllm.models.huggingface_config import huggingface_config

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        content = {key: value for key, value in (PLAIN | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_an_old_and_a_new_spelling_of_llama3_scaling_are_one_config(write: Callable[..., Path]) -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = huggingface_config(write(rope_theta=5e5, rope_scaling=rope | {"rope_type": "llama3"}))
    new = huggingface_config(write(rope_theta=..., rope_parameters=rope | {"rope_type": "llama3", "rope_theta": 5e5}))
    assert old == new
    assert new.rope.theta == 5e5
    assert new.rope.llama3 == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=64
    )


def test_eos_ids_of_config_and_generation_config_are_joined(write: Callable[..., Path]) -> None:
    folder = write(eos_token_id=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert huggingface_config(folder).eos_ids == frozenset({0, 2, 3})


def test_harmless_keys_and_switches_that_are_off_are_ignored(write: Callable[..., Path]) -> None:
    plain = huggingface_config(write())
    noisy = {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "new_switch": None, "dtype": "x"}
    assert huggingface_config(write(**noisy, **{"transformers.js_config": {"dtype": "q4"}})) == plain


@pytest.mark.parametrize("window", [128, 512, 4096])
def test_a_mistral_window_cuts_the_context_to_where_it_hides_nothing(window: int, write: Callable[..., Path]) -> None:
    config = huggingface_config(
        write(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=window)
    )
    assert config.max_context == min(window, 512)
    assert len(config.notes) == (window < 512)


def test_a_qwen2_window_counts_only_when_it_is_switched_on(write: Callable[..., Path]) -> None:
    qwen = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}
    assert huggingface_config(write(**qwen, use_sliding_window=False)).max_context == 512
    assert huggingface_config(write(**qwen, use_sliding_window=True)).max_context == 64
    assert huggingface_config(write(**qwen, layer_types=["full_attention", "sliding_attention"])).max_context == 64
    assert huggingface_config(write(**qwen)).qkv_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported; known: llama, mistral, qwen2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.* not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "mscale": 1.0}}, "rope setting mscale is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope setting full_attention is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"rope_interleaved": True}, "rope_interleaved = True is not known here"),
        ({"num_local_experts": 8}, "num_local_experts = 8 is not known here"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not known"),
        ({"use_qk_norm": True}, "use_qk_norm = True is not known"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .* is not known"),
        ({"auto_map": {"AutoModel": "modeling.X"}}, "auto_map = .* is not known"),
        ({"residual_multiplier": 0.2}, "residual_multiplier = 0.2 is not known"),
        ({"layer_types": ["chunked_attention"]}, "layer_types .'chunked_attention'. is not supported"),
        ({"layer_types": 5}, "layer_types 5 is not supported"),
        ({"layer_types": [[1]]}, r"layer_types \[\[1\]\] is not supported"),
        ({"model_type": []}, r"model_type \[\] is not supported"),
        ({"rope_theta": 10**400}, "rope_theta is 10+, a finite number is needed"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, a finite number is needed"),
        ({"num_attention_heads": 5}, "5 heads do not share 2 KV heads evenly"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4', a whole number is needed"),
        ({"hidden_size": ...}, "hidden_size is None"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": 0}, "must be positive"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id is .* token ids are needed"),
        ({"max_position_embeddings": 10**12}, "a context of 1000000000000 tokens"),
        ({"model_type": "mistral", "architectures": None, "num_key_value_heads": ...}, "num_key_value_heads is None"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(
    changes: dict[str, Any], message: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(ModelError, match=message):
        huggingface_config(write(**changes))


@pytest.mark.parametrize("content", ["", "[1]", "{", "\udcff", "[" * 100_000])
def test_a_broken_config_is_one_line_that_names_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json: ") as caught:
        huggingface_config(tmp_path)
    assert "\n" not in str(caught.value)
