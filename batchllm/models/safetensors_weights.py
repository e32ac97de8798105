"""Weights out of a Hugging Face folder's safetensors, one or sharded, under canonical names. Opens no pickle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from batchllm.errors import ModelError
from batchllm.models.config import ModelConfig
from batchllm.models.weight_files import weight_files
from batchllm.models.weights import canonical_shapes, check_account

_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_DTYPES = ("F32", "F16", "BF16")
# Old checkpoints carry the rope frequencies as a buffer; they follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class SafetensorsWeights:
    """The tensors of one folder. Construction checks that files and config agree on every tensor."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        shapes = canonical_shapes(config)
        self._names = {name: _file_name(name) for name in shapes}
        self._files: dict[str, Path] = {}
        found: dict[str, tuple[int, ...]] = {}
        for path in weight_files(folder):
            with _opened(path) as file:
                for name in file.keys():
                    if name in self._files:
                        raise ModelError(f"{folder}: tensor {name} is in {self._files[name].name} and in {path.name}")
                    if _DERIVED.fullmatch(name):
                        continue
                    stored = file.get_slice(name)
                    if stored.get_dtype() not in _DTYPES:
                        kind = stored.get_dtype()
                        raise ModelError(f"{path}: tensor {name} has type {kind}; {', '.join(_DTYPES)} are read")
                    self._files[name] = path
                    found[name] = tuple(stored.get_shape())
        if config.tied_embeddings and "lm_head.weight" in found:
            self._check_tied(folder)
            del found["lm_head.weight"]
        check_account({self._names[name]: shape for name, shape in shapes.items()}, found, where=str(folder))

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the CPU in `dtype`."""
        return self._read_stored(self._names[name]).to(dtype)

    def _read_stored(self, file_name: str) -> torch.Tensor:
        path = self._files[file_name]
        with _opened(path) as file:
            # A copy: the tensor must not keep the file mapped, nor change with it.
            return file.get_tensor(file_name).clone()

    def _check_tied(self, folder: Path) -> None:
        """A tied model may store its head as well, if it is the embedding."""
        embed = self._files.get("model.embed_tokens.weight")
        if embed is not None and not torch.equal(
            self._read_stored("lm_head.weight"), self._read_stored("model.embed_tokens.weight")
        ):
            raise ModelError(
                f"{folder}: lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings is on"
            )


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """`safe_open` for torch; whatever is wrong with the header is one ModelError."""
    try:
        file = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file: {error}") from error
    with file:
        yield file


def _file_name(canonical: str) -> str:
    if canonical in _NAMES:
        return _NAMES[canonical]
    _, layer, part = canonical.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}"
