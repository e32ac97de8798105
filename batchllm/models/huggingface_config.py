"""`ModelConfig` from a Hugging Face `config.json`. What changes the arithmetic and is not known is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from batchllm.errors import ModelError
from batchllm.models.config import Llama3Scaling, ModelConfig, RopeConfig, clamp_to_window
from batchllm.models.json_files import read_json, read_optional_json

_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}

_READ = frozenset(
    "model_type architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "intermediate_size vocab_size max_position_embeddings rms_norm_eps hidden_act rope_theta rope_scaling "
    "rope_parameters partial_rotary_factor tie_word_embeddings attention_bias mlp_bias sliding_window "
    "use_sliding_window max_window_layers layer_types bos_token_id eos_token_id".split()
)

_HARMLESS = frozenset(
    # Training, bookkeeping, other people's tools, and token ids that generation here does not use.
    "_name_or_path _commit_hash _attn_implementation _attn_implementation_autoset attn_implementation "
    "transformers_version torch_dtype dtype use_cache cache_implementation initializer_range attention_dropout "
    "hidden_dropout embd_pdrop resid_pdrop pretraining_tp chunk_size_feed_forward id2label label2id "
    "output_attentions output_hidden_states return_dict problem_type task_specific_params pad_token_id "
    "sep_token_id cls_token_id unk_token_id decoder_start_token_id tokenizer_class is_llama_config "
    "transformers.js_config unsloth_version unsloth_fixed model_name finetuning_task prefix torchscript "
    "use_bfloat16 gradient_checkpointing num_labels".split()
)

_ROPE_KEYS = frozenset(
    "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
    "partial_rotary_factor".split()
)


def huggingface_config(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of `folder`."""
    path = folder / "config.json"
    raw = read_json(path)
    _refuse_unknown(raw, path)
    architecture = raw["model_type"]
    num_heads = _integer(raw, "num_attention_heads", path)
    hidden_size = _integer(raw, "hidden_size", path)
    # Only the first Llama configs leave the KV heads out, meaning one for each query head.
    num_kv_heads = _integer(raw, "num_key_value_heads", path, default=num_heads if architecture == "llama" else None)
    head_dim = _integer(raw, "head_dim", path, default=hidden_size // max(num_heads, 1))
    max_context, notes = clamp_to_window(_integer(raw, "max_position_embeddings", path), _window(raw, path))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=_integer(raw, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_integer(raw, "intermediate_size", path),
        vocab_size=_integer(raw, "vocab_size", path),
        max_context=max_context,
        rms_eps=_number(raw, "rms_norm_eps", path, default=1e-6),
        rope=_rope(raw, path),
        tied_embeddings=bool(raw.get("tie_word_embeddings") or False),
        qkv_bias=architecture == "qwen2",
        bos_id=next(iter(sorted(_ids(raw, "bos_token_id", path))), None),
        eos_ids=_ids(raw, "eos_token_id", path)
        | _ids(
            read_optional_json(folder / "generation_config.json"), "eos_token_id", folder / "generation_config.json"
        ),
        notes=notes,
    )


def _refuse_unknown(raw: dict[str, Any], path: Path) -> None:
    architecture = raw.get("model_type")
    if not isinstance(architecture, str) or architecture not in _CLASSES:
        raise ModelError(f"{path}: model_type {architecture!r} is not supported; known: {', '.join(_CLASSES)}")
    classes = raw.get("architectures")
    if classes and classes != [_CLASSES[architecture]]:
        raise ModelError(f"{path}: architectures {classes} is not supported; {_CLASSES[architecture]} is")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; silu is")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ModelError(f"{path}: {key} is not supported for {architecture}")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError(f"{path}: partial_rotary_factor {raw['partial_rotary_factor']} is not supported")
    for key, value in raw.items():
        # A switch that is off, and a list or table with nothing in it, change nothing.
        if key not in _READ and key not in _HARMLESS and value not in (None, False, {}, []):
            raise ModelError(
                f"{path}: {key} = {str(value)[:60]} is not known here and could change what the model computes"
            )


def _rope(raw: dict[str, Any], path: Path) -> RopeConfig:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"{path}: rope_scaling {scaling!r} is not an object")
    unknown = sorted(set(scaling) - _ROPE_KEYS)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{path}: rope type {kind!r} is not supported; known: default, linear, llama3")
    if unknown:
        raise ModelError(f"{path}: rope setting {unknown[0]} is not supported")
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError(f"{path}: partial_rotary_factor {scaling['partial_rotary_factor']} is not supported")
    theta = _number(scaling if "rope_theta" in scaling else raw, "rope_theta", path, default=10000.0)
    if kind == "linear":
        return RopeConfig(theta=theta, linear_factor=_number(scaling, "factor", path))
    if kind == "llama3":
        llama3 = Llama3Scaling(
            factor=_number(scaling, "factor", path),
            low_freq_factor=_number(scaling, "low_freq_factor", path),
            high_freq_factor=_number(scaling, "high_freq_factor", path),
            original_max_context=_integer(scaling, "original_max_position_embeddings", path),
        )
        if llama3.high_freq_factor <= llama3.low_freq_factor or llama3.factor <= 0:
            raise ModelError(f"{path}: llama3 rope scaling needs factor > 0 and high_freq_factor above low_freq_factor")
        return RopeConfig(theta=theta, llama3=llama3)
    return RopeConfig(theta=theta)


def _window(raw: dict[str, Any], path: Path) -> int | None:
    """The sliding window where one is in force. Qwen2 names a window that `use_sliding_window` then switches off."""
    kinds = raw.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise ModelError(f"{path}: layer_types {str(kinds)[:60]} is not supported")
    if raw["model_type"] == "qwen2":
        in_force = bool(raw.get("use_sliding_window", False))
    else:
        in_force = raw.get("sliding_window") is not None
    if "sliding_attention" in kinds and raw.get("sliding_window") is None:
        raise ModelError(f"{path}: layer_types asks for sliding_attention without a sliding_window")
    return _integer(raw, "sliding_window", path) if in_force or "sliding_attention" in kinds else None


def _integer(raw: dict[str, Any], key: str, path: Path, *, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if type(value) is not int:
        raise ModelError(f"{path}: {key} is {value!r}, a whole number is needed")
    return value


def _number(raw: dict[str, Any], key: str, path: Path, *, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{path}: {key} is {value!r}, a number is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ModelError(f"{path}: {key} is {str(value)[:60]}, a finite number is needed")
    return number


def _ids(raw: dict[str, Any], key: str, path: Path) -> frozenset[int]:
    value = raw.get(key)
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(item) is not int for item in values):
        raise ModelError(f"{path}: {key} is {value!r}, token ids are needed")
    return frozenset(values)
