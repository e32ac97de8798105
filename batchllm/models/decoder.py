"""The decoder of the Llama family over paged KV: one forward pass for any mix of prefill and decode rows.

Per layer: RMSNorm, fused QKV, RoPE with KV write, attention over the plan's work items, output projection, the feed-forward part. All
layers up to the last one's attention are one operation, and what follows it, for the sampled rows, is another. The residual stream is one
tensor that both projections add into. All operations come from one `Kernels`.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch

from batchllm.errors import JobError, ModelError
from batchllm.kernels.attention import AttentionPlan, HeadShape
from batchllm.kernels.between_attention import KvTarget, LayerEnd, LayerStart
from batchllm.kernels.floats import FP8_DTYPE
from batchllm.kernels.layers import Layer
from batchllm.models.config import ModelConfig
from batchllm.models.kv_scales import kv_scales
from batchllm.models.rope_table import rope_table
from batchllm.models.rotated_weights import RotatedWeights
from batchllm.models.weights import Weights
from batchllm.ops import Kernels

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

PARTS = frozenset({"qkv", "output", "gate_up", "down", "head"})
"""A decoder's products by name, each of which can have int8 weights."""

INT8_PARTS = frozenset({"qkv", "output", "gate_up", "head"})
"""The products that `engine.weights: int8` rounds; see docs/performance.md for what each costs in quality."""


class Decoder:
    """A loaded model. Owns its weights; the KV pool belongs to the caller. Stateless between calls.

    `fingerprint` names the weights (see `model_fingerprint`) and which of them are rounded; `dtype` is that of weights, activations and
    hidden rows, `kv_dtype` that of the pool. Products of `int8_parts`, some of `PARTS`, have int8 weights; embeddings and norms never do.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        fingerprint: str,
        int8_parts: frozenset[str] = frozenset(),
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`kv_dtype`: what keys and values are kept in, `dtype` where None."""
        assert int8_parts <= PARTS, int8_parts
        if int8_parts:
            weights = RotatedWeights(weights, config)

        num_weights = [0, 0]

        def load(name: str) -> torch.Tensor:
            return weights.read(name, dtype).to(device)

        def pack(part: str, *names: str, biases: tuple[str, ...] = ()) -> Any:
            bias = torch.cat([load(name) for name in biases]) if biases else None
            weight = load(names[0]) if len(names) == 1 else torch.cat([load(name) for name in names])
            num_weights[part in int8_parts] += weight.numel()
            pack_linear = kernels.pack_linear_gated if part == "gate_up" else kernels.pack_linear
            return pack_linear(weight, bias, int8=part in int8_parts)

        self.config = config
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = device
        self.kernels = kernels
        self.fingerprint = fingerprint
        if int8_parts:
            # Keys and values of rounded weights are others.
            self.fingerprint += f" turned, int8: {', '.join(sorted(int8_parts))}"
        self._scale = config.head_dim**-0.5
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, dtype)
        self._kv_scale = None
        if self.kv_dtype != dtype:
            self._kv_scale = kv_scales(config, weights).to(device)
        is_shared = config.tied_embeddings and not int8_parts
        self._head = pack("head", "embed" if is_shared else "lm_head")
        self._embed = None if is_shared else load("embed")
        """None: the head's rows are the tokens'."""
        self._final_norm = load("final_norm")
        self._cos_sin = rope_table(config, num_positions=config.max_context, device=device)
        self._layers: list[Layer] = []
        for number in range(config.num_layers):
            prefix = f"layers.{number}."
            biases = tuple(prefix + part for part in ("q_bias", "k_bias", "v_bias")) if config.qkv_bias else ()
            self._layers.append(
                Layer(
                    start=LayerStart(
                        norm=load(prefix + "attn_norm"),
                        qkv=pack("qkv", prefix + "q", prefix + "k", prefix + "v", biases=biases),
                    ),
                    end=LayerEnd(
                        output=pack("output", prefix + "o"),
                        norm=load(prefix + "mlp_norm"),
                        gate_up=pack("gate_up", prefix + "gate", prefix + "up"),
                        down=pack("down", prefix + "down"),
                    ),
                )
            )
        self._packed_layers = kernels.pack_layers(self._layers)
        plain, rounded = num_weights
        self.bytes_per_weight = (plain * dtype.itemsize + rounded) / (plain + rounded)
        """Of the products' weights, on average: int8 ones take one."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.kv_dtype.itemsize

    def cut(self, num_layers: int) -> Decoder:
        """The first `num_layers` layers over the same weights: no model, but a measure of one."""
        shorter = copy.copy(self)
        shorter.config = dataclasses.replace(self.config, num_layers=num_layers)
        shorter._layers = self._layers[:num_layers]
        shorter._packed_layers = self.kernels.pack_layers(shorter._layers)
        return shorter

    @torch.no_grad()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        plan: AttentionPlan,
        kv: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """The final-normed hidden rows `sample_rows` int64 [num_samples] -> [num_samples, hidden_size], in `dtype`.

        `token_ids` int64 [num_rows], each below the vocabulary size; `positions` int32 and `slots` int64 [num_rows], as
        in `rope_write_kv`; `kv` is the block pool as in `attention`, and takes the rows' keys and values.
        What follows the last layer's attention is computed for the sampled rows only, and so is that attention where `plan.last_items` says so.
        """
        kernels, config, eps = self.kernels, self.config, self.config.rms_eps
        plan = kernels.schedule_attention(plan, self._heads)
        residual = kernels.packed_rows(self._head, token_ids) if self._embed is None else self._embed[token_ids]
        attended = kernels.to_last_attention(
            residual,
            self._packed_layers,
            eps=eps,
            target=KvTarget(self._cos_sin, kv, 0, positions, slots, config.num_heads, self._kv_scale),
            plan=plan,
            scale=self._scale,
        )
        if attended is None:
            return residual[:0]
        return kernels.after_last_attention(
            residual, attended, self._packed_layers, rows=sample_rows, norm=self._final_norm, eps=eps
        )

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] of rows that `forward` gave."""
        return self.kernels.linear_logits(hidden, self._head)

    @torch.no_grad()
    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """int64 [num_rows]: each row's likeliest token, the lowest id among equals; keeps no logits."""
        return self.kernels.linear_argmax(hidden, self._head)


def int8_parts_for(name: str) -> frozenset[str]:
    """The products that a job's `weights` rounds: none for `auto`, `INT8_PARTS` for `int8`."""
    if name not in ("auto", "int8"):
        raise ModelError(f"weights {name!r} are not known; auto and int8 are")
    return INT8_PARTS if name == "int8" else frozenset()


def dtype_for(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype that a job's `dtype` names: `bf16`, `fp32`, or `auto`."""
    if name == "auto":
        return auto_dtype(device)
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not known; auto, bf16 and fp32 are")
    return _DTYPES[name]


def kv_dtype_for(name: str, *, dtype: torch.dtype, kernels: Kernels) -> torch.dtype:
    """The torch dtype that a job's `engine.kv.dtype` names, `dtype` being the model's. Raises JobError where `kernels` have no such pool."""
    if name == "auto":
        return dtype
    if FP8_DTYPE not in kernels.kv_dtypes:
        raise JobError(
            f"engine.kv.dtype: {name} needs a GPU; the {kernels.name} kernels keep keys and values as they are computed"
        )
    return FP8_DTYPE


def auto_dtype(device: torch.device) -> torch.dtype:
    """bf16 where `device` multiplies it in hardware (a GPU that can, AVX512-BF16, AMX, Arm's bf16), else fp32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    cpu_info = Path("/proc/cpuinfo")
    flags = set(cpu_info.read_text().split()) if cpu_info.exists() else set()
    return torch.bfloat16 if flags & {"amx_bf16", "avx512_bf16", "bf16"} else torch.float32
