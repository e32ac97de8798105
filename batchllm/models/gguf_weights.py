"""Weights out of a GGUF file: dequantised a slice at a time, under canonical names.

The llama architecture (Mistral is one of it) stores the rows of q and k of each head with the two halves interleaved;
here they are put back into halves. Other architectures store them as they are.
"""

from __future__ import annotations

import numpy as np
import torch

from batchllm.errors import ModelError
from batchllm.kernels.dequantise import dequantise
from batchllm.models.config import ModelConfig
from batchllm.models.gguf_file import GgufFile
from batchllm.models.weights import canonical_shapes, check_account

_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_SLICE_ELEMENTS = 1 << 23
"""Elements dequantised at once: bounds what is read and what is float32 in between."""


class GgufWeights:
    """The tensors of one file. Construction checks that file and config agree on every tensor."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        shapes = canonical_shapes(config)
        self._file = file
        self._config = config
        self._names = {name: _file_name(name) for name in shapes}
        found = {name: tensor.shape for name, tensor in file.tensors.items()}
        # Read into the config already, as the rope's divisors.
        found.pop("rope_freqs.weight", None)
        check_account({self._names[name]: shape for name, shape in shapes.items()}, found, where=str(file.path))

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the CPU in `dtype`, dequantised in float32 and rounded once."""
        tensor = self._file.tensors[self._names[name]]
        row_bytes = tensor.num_bytes // (tensor.shape[0] if len(tensor.shape) > 1 else 1)
        num_rows = tensor.num_bytes // row_bytes
        out = torch.empty(tensor.shape, dtype=dtype)
        flat = out.view(num_rows, -1)
        step = max(1, _SLICE_ELEMENTS // flat.shape[1])
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            stored = np.fromfile(
                self._file.path, np.uint8, (stop - start) * row_bytes, offset=tensor.offset + start * row_bytes
            )
            if stored.size != (stop - start) * row_bytes:
                raise ModelError(f"{self._file.path}: tensor {tensor.name} is cut short")
            try:
                dequantise(stored.reshape(stop - start, row_bytes), tensor.kind, flat[start:stop])
            except NotImplementedError as error:
                raise ModelError(
                    f"{self._file.path}: tensor {tensor.name}: type {tensor.kind.name} cannot be read"
                ) from error
        part = name.rpartition(".")[2]
        if self._config.architecture == "llama" and part in ("q", "k"):
            return _halves(out, self._config.num_heads if part == "q" else self._config.num_kv_heads)
        return out


def _file_name(canonical: str) -> str:
    if canonical in _NAMES:
        return _NAMES[canonical]
    _, layer, part = canonical.split(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}"


def _halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows (0, half, 1, half + 1, ...) of each head back to (0, 1, ..., half, half + 1, ...)."""
    out_size, in_size = weight.shape
    pairs = weight.view(num_heads, out_size // num_heads // 2, 2, in_size)
    return pairs.transpose(1, 2).reshape(out_size, in_size)
