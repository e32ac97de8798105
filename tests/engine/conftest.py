"""A model that costs nothing: its next token depends on the last token and its position, so a wrong row shows."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from batchllm.kernels.attention import AttentionPlan
from batchllm.ops import REFERENCE, Kernels
from batchllm.prompt import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # disk_weather


@dataclass(frozen=True)
class StubConfig:
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 2
    vocab_size: int = 64
    max_context: int = 512


@dataclass
class StubDecoder:
    """`hidden` is (last token, position); the likeliest next token is their mix. Token `eos` ends a row when it comes up."""

    config: StubConfig = field(default_factory=StubConfig)
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kernels: Kernels = REFERENCE
    poisoned_token: int = -1
    poison: float = torch.nan

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        plan: AttentionPlan,
        kv: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        hidden = torch.stack([token_ids, positions.long()], dim=1)[sample_rows].float()
        hidden[hidden[:, 0] == self.poisoned_token] = self.poison
        return hidden.to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        vocabulary = torch.arange(self.config.vocab_size).float()
        hidden = hidden.float()
        target = (hidden[:, 0] * 31 + hidden[:, 1] * 7) % self.config.vocab_size
        return -(vocabulary - target.unsqueeze(1)).abs()

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden).argmax(dim=1)


@dataclass(frozen=True)
class StubVocabulary:
    eos_ids: frozenset[int] = frozenset({63})
    token_bytes: tuple[bytes, ...] = tuple(bytes([97 + i % 26]) for i in range(63)) + (b"",)
    special_tokens: dict[str, int] = field(default_factory=lambda: {"<eos>": 63})


@dataclass(frozen=True)
class ListedPrompts:
    """Prompts as the planner and the engine read them."""

    folder: Path
    prompts: list[np.ndarray]
    sampling: list[SamplingParams]
    sampling_id: np.ndarray
    row_index: np.ndarray
    sample_index: np.ndarray

    @property
    def length(self) -> np.ndarray:
        return np.array([prompt.size for prompt in self.prompts], dtype=np.int32)

    @property
    def offset(self) -> np.ndarray:
        return np.cumsum(self.length, dtype=np.int64) - self.length

    def tokens(self, prompt: int) -> np.ndarray:
        return self.prompts[prompt]


@pytest.fixture(scope="session")
def tier_job() -> ModuleType:
    """The batch of `tier_job.py`, which is also a script."""
    spec = importlib.util.spec_from_file_location("tier_job", Path(__file__).with_name("tier_job.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tier_job"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def list_prompts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ListedPrompts]:
    """A function (prompts, params of each) -> staged prompts."""

    def stage(prompts: list[list[int]], params: list[SamplingParams]) -> ListedPrompts:
        folder = tmp_path_factory.mktemp("prompts")
        np.array([token for prompt in prompts for token in prompt], dtype="<i4").tofile(folder / "tokens.bin")
        distinct = list(dict.fromkeys(params))
        return ListedPrompts(
            folder=folder,
            prompts=[np.array(prompt, dtype=np.int32) for prompt in prompts],
            sampling=distinct,
            sampling_id=np.array([distinct.index(item) for item in params], dtype=np.int32),
            row_index=np.arange(len(prompts), dtype=np.int64),
            sample_index=np.zeros(len(prompts), dtype=np.int32),
        )

    return stage


@pytest.fixture(scope="session")
def make_stub_decoder() -> Callable[..., StubDecoder]:
    return StubDecoder


@pytest.fixture(scope="session")
def make_stub_vocabulary() -> Callable[..., StubVocabulary]:
    return StubVocabulary


@pytest.fixture
def stub_decoder() -> Callable[..., StubDecoder]:
    return StubDecoder


@pytest.fixture
def stub_vocabulary() -> StubVocabulary:
    return StubVocabulary()
