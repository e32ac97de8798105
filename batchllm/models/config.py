"""`ModelConfig`: what the decoder computes, the same for every source; `read_config` picks the reader."""

from __future__ import annotations

from dataclasses import dataclass

from batchllm.errors import ModelError

MAX_CONTEXT_LIMIT = 1 << 21
"""Positions that the rope table is made for; at head size 128 that many take 1 GiB."""

MAX_VOCAB_SIZE = 1 << 22
"""Tokens that tables are made for: more than ten times what any model has."""

_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: long wavelengths are divided by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies: theta^(-2i/head_dim), divided by `linear_factor`, by `llama3`'s rule, or by `factors`.

    `factors` has head_dim / 2 divisors.
    """

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Llama family. Raises ModelError where sizes do not fit together.

    `max_context` is in tokens, and already cut to the sliding window where the model has one: up to there the window
    hides nothing, so full attention is exact. `notes` says such things in one line each.
    `eos_ids` holds what config, generation config or GGUF declare; the tokenizer's own are added in `load_tokenizer`.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rms_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    bos_id: int | None
    eos_ids: frozenset[int]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ModelError(f"model config: {name} is {getattr(self, name)}")
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ModelError(f"model config: vocab_size is {self.vocab_size}; 1 to {MAX_VOCAB_SIZE} are taken")
        if not 1 <= self.num_layers <= _MAX_LAYERS:
            raise ModelError(f"model config: {self.num_layers} layers; this program takes 1 to {_MAX_LAYERS}")
        if not 1 <= self.max_context <= MAX_CONTEXT_LIMIT:
            raise ModelError(
                f"model config: a context of {self.max_context} tokens; 1 to {MAX_CONTEXT_LIMIT} are taken"
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"model config: {self.num_heads} heads do not share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"model config: head_dim {self.head_dim} is odd, which rope cannot rotate")
        if not 0 < self.rms_eps < 1 or not self.rope.theta > 0 or not self.rope.linear_factor > 0:
            raise ModelError("model config: rms_norm_eps, rope theta and rope factor must be positive")
        if self.rope.factors is not None and len(self.rope.factors) != self.head_dim // 2:
            raise ModelError(f"model config: {len(self.rope.factors)} rope factors for head_dim {self.head_dim}")


def clamp_to_window(max_context: int, window: int | None) -> tuple[int, tuple[str, ...]]:
    """(context, notes) for a model whose tokens see `window` positions back, their own included; None: all."""
    if window is None or window >= max_context:
        return max_context, ()
    if window < 1:
        raise ModelError(f"model config: a sliding window of {window} tokens")
    note = (
        f"sliding window of {window} tokens: the context is cut from {max_context} to {window}, where it hides nothing"
    )
    return window, (note,)
