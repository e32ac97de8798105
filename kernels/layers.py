"""All layers of a forward pass up to the last one's attention.

The first layer's start, its attention, what lies between it and the next one's, and so on. What follows the last attention is left to the
caller, who may want it for some rows only. Bound: as the operations it is made of.

One operation, so that a backend can run all of it in one call: between two operations the caches hold rows, and Python is cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from batchllm.kernels.attention import AttentionPlan, attention
from batchllm.kernels.attention_triton import attention_triton
from batchllm.kernels.between_attention import (
    KvTarget,
    LayerEnd,
    LayerStart,
    between_attention,
    between_attention_triton,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, the products packed."""

    start: LayerStart
    end: LayerEnd


@dataclass(frozen=True, slots=True)
class LayerOperations:
    """The operations of which a backend's `to_last_attention` can be put together: `in_turn` is its meaning."""

    between_attention: Callable[..., torch.Tensor | None]
    attention: Callable[..., torch.Tensor]

    def in_turn(
        self,
        residual: torch.Tensor,
        layers: Sequence[Layer],
        *,
        eps: float,
        target: KvTarget,
        plan: AttentionPlan,
        scale: float,
        attends_last: bool = True,
    ) -> torch.Tensor | None:
        """What the last layer's attention gave, [num_rows, num_heads * head_dim]; `residual` [num_rows, hidden_size] is then, **in place**,
        what that layer began with.

        `layers`: as `pack_layers` gave them. `target`: the first layer's; each next one's keys and values go to the pool's next layer, and
        are read from there. Without `attends_last` the last layer's keys and values are written, and nothing is given back.
        """
        attended, end = None, None
        for number, layer in enumerate(layers, start=target.layer):
            query = self.between_attention(
                residual,
                eps=eps,
                attended=attended,
                end=end,
                start=layer.start,
                target=replace(target, layer=number),
            )
            if not attends_last and number == target.layer + len(layers) - 1:
                return None
            attended = self.attention(
                query, target.kv, layer=number, plan=plan, scale=scale, kv_scale=target.kv_scale
            ).flatten(1)
            end = layer.end
        return attended


def pack_layers(layers: Sequence[Layer]) -> Sequence[Layer]:
    """Consecutive layers as `to_last_attention` takes them: where that is Python, as they are."""
    return tuple(layers)


to_last_attention = LayerOperations(between_attention, attention).in_turn
"""The reference."""

to_last_attention_triton = LayerOperations(between_attention_triton, attention_triton).in_turn
