"""`ModelConfig` from GGUF metadata. A key below the architecture's name that is not known here is refused."""

from __future__ import annotations

import math
import struct
from typing import Any

from batchllm.errors import ModelError
from batchllm.models.config import ModelConfig, RopeConfig, clamp_to_window
from batchllm.models.gguf_file import GgufFile

_ARCHITECTURES = ("llama", "qwen2")
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_READ = frozenset(
    "block_count context_length embedding_length feed_forward_length attention.head_count attention.head_count_kv "
    "attention.layer_norm_rms_epsilon attention.key_length attention.value_length attention.sliding_window "
    "attention.causal rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor rope.scale_linear "
    "vocab_size expert_count expert_used_count".split()
)
_HARMLESS = frozenset("rope.scaling.original_context_length rope.scaling.finetuned".split())


def gguf_config(file: GgufFile) -> ModelConfig:
    """Reads the settings of `file`. Raises ModelError that names the key which this program cannot compute."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported; known: {', '.join(_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    raw = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    _refuse_unsupported(raw, file)
    hidden_size = _integer(raw, "embedding_length", file)
    num_heads = _integer(raw, "attention.head_count", file)
    head_dim = _integer(raw, "attention.key_length", file, default=hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if raw.get(key, head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {prefix}{key} {raw[key]} differs from the head size {head_dim}; not supported"
            )
    window = _integer(raw, "attention.sliding_window", file, default=0) or None
    max_context, notes = clamp_to_window(_integer(raw, "context_length", file), window)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    vocab_size = _integer(raw, "vocab_size", file, default=embedding.shape[0])
    if vocab_size != embedding.shape[0]:
        raise ModelError(
            f"{file.path}: {prefix}vocab_size {vocab_size} differs from the {embedding.shape[0]} rows of token_embd.weight"
        )
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=_integer(raw, "block_count", file),
        num_heads=num_heads,
        num_kv_heads=_integer(raw, "attention.head_count_kv", file, default=num_heads),
        head_dim=head_dim,
        intermediate_size=_integer(raw, "feed_forward_length", file),
        vocab_size=vocab_size,
        max_context=max_context,
        rms_eps=_decimal(_number(raw, "attention.layer_norm_rms_epsilon", file)),
        rope=RopeConfig(
            theta=_number(raw, "rope.freq_base", file, default=10000.0),
            linear_factor=_linear_factor(raw, file),
            factors=_rope_factors(file),
        ),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias=architecture == "qwen2",
        bos_id=_token_id(file, "bos_token_id"),
        eos_ids=frozenset(token_id for key in _EOS_KEYS if (token_id := _token_id(file, key)) is not None),
        notes=notes,
    )


def _refuse_unsupported(raw: dict[str, Any], file: GgufFile) -> None:
    architecture = file.metadata["general.architecture"]
    for key in raw:
        if key not in _READ and key not in _HARMLESS:
            raise ModelError(
                f"{file.path}: {architecture}.{key} is not known here and could change what the model computes"
            )
    for key in ("expert_count", "expert_used_count"):
        if raw.get(key, 0):
            raise ModelError(f"{file.path}: {architecture}.{key} {raw[key]}: mixtures of experts are not supported")
    if not raw.get("attention.causal", True):
        raise ModelError(f"{file.path}: {architecture}.attention.causal is off, which is not supported")
    kind = raw.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; known: none, linear")


def _linear_factor(raw: dict[str, Any], file: GgufFile) -> float:
    if raw.get("rope.scaling.type") == "none":
        return 1.0
    if "rope.scaling.factor" in raw:
        return _number(raw, "rope.scaling.factor", file)
    return _number(raw, "rope.scale_linear", file, default=1.0)


def _rope_factors(file: GgufFile) -> tuple[float, ...] | None:
    """Llama 3.1's scaling as GGUF carries it: a divisor for each frequency, in a tensor of its own."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.kind.name != "F32" or len(tensor.shape) != 1:
        raise ModelError(
            f"{file.path}: tensor rope_freqs.weight is {tensor.kind.name} {tensor.shape}; F32 in one row is read"
        )
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        factors = struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.num_bytes))
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelError(f"{file.path}: tensor rope_freqs.weight holds a divisor that is not a positive number")
    return factors


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and type(value) is not int:
        raise ModelError(f"{file.path}: tokenizer.ggml.{key} is {str(value)[:60]}, a token id is needed")
    return value


def _decimal(value: float) -> float:
    """The short decimal that a float32 stands for: 9.999999747378752e-06 was 1e-05 before GGUF stored it."""
    return float(f"{value:.7g}")


def _integer(raw: dict[str, Any], key: str, file: GgufFile, *, default: int | None = None) -> int:
    value = raw.get(key, default)
    if type(value) is not int:
        name = f"{file.metadata['general.architecture']}.{key}"
        raise ModelError(f"{file.path}: {name} is {str(value)[:60]}, one whole number is needed")
    return value


def _number(raw: dict[str, Any], key: str, file: GgufFile, *, default: float | None = None) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{file.path}: {file.metadata['general.architecture']}.{key} is {value!r}, a number is needed")
    return float(value)
