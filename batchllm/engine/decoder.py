"""The model as the engine sees it."""

from __future__ import annotations

from typing import Protocol

import torch

from batchllm.engine.pool import KeptHeads, KvShape
from batchllm.kernels.attention import AttentionPlan
from batchllm.ops import Kernels


class DecoderConfig(KeptHeads, Protocol):
    """What the engine must know of a model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context(self) -> int: ...


class Decoder(Protocol):
    """The model as the engine calls it. Shapes as in `batchllm.models.decoder`."""

    @property
    def config(self) -> DecoderConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def kv_dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def kernels(self) -> Kernels: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        plan: AttentionPlan,
        kv: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor: ...


def kv_shape(decoder: Decoder) -> KvShape:
    """What `decoder` keeps of a token."""
    return KvShape.of(decoder.config, decoder.kv_dtype)
