"""A decoder from a model's files, whatever their format."""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchllm.models.decoder import Decoder
from batchllm.models.fingerprint import model_fingerprint
from batchllm.models.gguf_config import gguf_config
from batchllm.models.gguf_file import read_gguf_once
from batchllm.models.gguf_weights import GgufWeights
from batchllm.models.huggingface_config import huggingface_config
from batchllm.models.safetensors_weights import SafetensorsWeights
from batchllm.models.source import ModelSource
from batchllm.models.weights import Weights, WeightsUntil
from batchllm.ops import Kernels


def load_decoder(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    int8_parts: frozenset[str] = frozenset(),
    kv_dtype: torch.dtype | None = None,
    fingerprint: str | None = None,
    given_up: Callable[[], bool] | None = None,
) -> Decoder:
    """Reads config and weights, one tensor at a time. Raises ModelError that names what is wrong with which file.

    `fingerprint`: that of `source`, if it is known already. Once `given_up` is true the next tensor raises LoadGivenUp.
    """
    if source.kind == "gguf":
        file = read_gguf_once(source.path)
        config = gguf_config(file)
        weights: Weights = GgufWeights(file, config)
    else:
        config = huggingface_config(source.path)
        weights = SafetensorsWeights(source.path, config)
    if given_up is not None:
        weights = WeightsUntil(weights, given_up)
    return Decoder(
        config,
        weights,
        dtype=dtype,
        device=device,
        kernels=kernels,
        fingerprint=fingerprint or model_fingerprint(source),
        int8_parts=int8_parts,
        kv_dtype=kv_dtype,
    )
