"""What the engine asks of a tokenizer and of the staged prompts; `decoder` says what of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from batchllm.prompt import SamplingParams


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
