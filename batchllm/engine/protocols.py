"""What the engine asks of a model, a tokenizer and the staged prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from batchllm.kernels.attention import AttentionPlan
from batchllm.ops import Kernels
from batchllm.prompt import SamplingParams


class DecoderConfig(Protocol):
    """What the engine must know of a model."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
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


class Vocabulary(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def token_bytes(self) -> Sequence[bytes]: ...
    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]: ...


class Store(Protocol):
    """The staged prompts, as the engine reads them."""

    @property
    def row_index(self) -> np.ndarray: ...
    @property
    def sample_index(self) -> np.ndarray: ...
    @property
    def sampling_id(self) -> np.ndarray: ...
    @property
    def sampling(self) -> list[SamplingParams]: ...

    def tokens(self, prompt: int) -> np.ndarray: ...
