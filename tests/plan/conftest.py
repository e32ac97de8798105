"""In-memory prompts for planning tests: the fields of the prompt store, over a token file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from batchllm.prompt import SamplingParams


@dataclass(frozen=True)
class ListedPrompts:
    folder: Path
    offset: np.ndarray
    length: np.ndarray
    sampling_id: np.ndarray
    sampling: list[SamplingParams]

    def tokens(self, number: int) -> np.ndarray:
        begin = int(self.offset[number])
        return np.fromfile(self.folder / "tokens.bin", dtype="<i4")[begin : begin + int(self.length[number])]


@pytest.fixture(scope="session")
def stage_prompts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ListedPrompts]:
    """A function (prompts, max_tokens=None) -> staged prompts, each call in a folder of its own."""

    def stage(prompts: list[list[int]], max_tokens: list[int] | None = None) -> ListedPrompts:
        folder = tmp_path_factory.mktemp("prompts")
        length = np.array([len(p) for p in prompts], dtype=np.int32)
        np.array([token for p in prompts for token in p], dtype="<i4").tofile(folder / "tokens.bin")
        limits = max_tokens or [16] * len(prompts)
        distinct = sorted(set(limits))
        return ListedPrompts(
            folder=folder,
            offset=np.cumsum(length, dtype=np.int64) - length,
            length=length,
            sampling_id=np.array([distinct.index(limit) for limit in limits], dtype=np.int32),
            sampling=[SamplingParams(max_tokens=limit) for limit in distinct],
        )

    return stage
