"""`ModelSource`: where a model lies, and its config read from there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchllm.models.config import ModelConfig
from batchllm.models.gguf_config import gguf_config
from batchllm.models.gguf_file import read_gguf_once
from batchllm.models.huggingface_config import huggingface_config

PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
"""Files that may run code when they are opened, and never are."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: `path` is the GGUF file or the Hugging Face folder, `name` what the user called it."""

    kind: Literal["gguf", "huggingface"]
    path: Path
    name: str


def read_config(source: ModelSource) -> ModelConfig:
    """The model's settings; reads no weights. Raises ModelError for what this program cannot compute."""
    if source.kind == "gguf":
        return gguf_config(read_gguf_once(source.path))
    return huggingface_config(source.path)
