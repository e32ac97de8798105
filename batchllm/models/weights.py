"""The decoder's tensors by canonical name, whatever the file calls them, and the account that leaves none over.

Canonical names: `embed`, `final_norm`, `lm_head` (untied only), and for layer i `layers.i.` + `attn_norm`, `q`, `k`,
`v`, `o`, `mlp_norm`, `gate`, `up`, `down`, and `q_bias`, `k_bias`, `v_bias` where the model has them.
Matrices are [out_size, in_size]; rows of q and k lie head by head, each head in halves as `rope_write_kv` rotates them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from batchllm.errors import ModelError
from batchllm.models.config import ModelConfig

_NAMED = 4
"""Names that an error message lists before it counts the rest."""


class Weights(Protocol):
    """Reads one tensor at a time; nothing is held between reads."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor with this canonical name, on the CPU, own memory, in `dtype`."""
        ...


class LoadGivenUp(Exception):
    """Nobody waits for the weights any more."""


class WeightsUntil:
    """Other weights until `given_up` is true: from then on a read raises LoadGivenUp."""

    def __init__(self, weights: Weights, given_up: Callable[[], bool]) -> None:
        self._weights = weights
        self._given_up = given_up

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if self._given_up():
            raise LoadGivenUp
        return self._weights.read(name, dtype)


def canonical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the decoder needs, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (query_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, query_size),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {"q_bias": (query_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "final_norm": (hidden,)}
    if not config.tied_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    for number in range(config.num_layers):
        shapes |= {f"layers.{number}.{part}": shape for part, shape in layer.items()}
    return shapes


def check_account(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], *, where: str) -> None:
    """Raises ModelError that names the tensors (by the file's names) that are missing, unknown, or of another shape."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{where}: missing {_listed(missing)}")
    unknown = [name for name in found if name not in expected]
    if unknown:
        raise ModelError(f"{where}: unknown {_listed(unknown)}; this program does not know what to compute with it")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"{where}: tensor {name} has shape {list(found[name])}, the config asks for {list(shape)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{more}"
