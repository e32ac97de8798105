"""A forward pass in two operations: all layers up to the last one's attention, and what follows it, for the rows that are sampled.

The first layer's start, its attention, what lies between it and the next one's, and so on; then the last layer's end and the final norm.
Bound: as the operations they are made of.

Two operations, so that a backend can run each in one call: between two operations the caches hold rows, and Python is cold.
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
from batchllm.kernels.norm import rms_norm, rms_norm_triton


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, the products packed."""

    start: LayerStart
    end: LayerEnd


@dataclass(frozen=True, slots=True)
class LayerOperations:
    """The operations of which a backend's `to_last_attention` and `after_last_attention` can be put together: here is their meaning."""

    between_attention: Callable[..., torch.Tensor | None]
    attention: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]

    def to_last_attention(
        self,
        residual: torch.Tensor,
        layers: Sequence[Layer],
        *,
        eps: float,
        target: KvTarget,
        plan: AttentionPlan,
        scale: float,
    ) -> torch.Tensor | None:
        """What the last layer's attention gave, [num_rows, num_heads * head_dim]; `residual` [num_rows, hidden_size] is then, **in place**,
        what that layer began with.

        `layers`: as `pack_layers` gave them. `target`: the first layer's; each next one's keys and values go to the pool's next layer, and
        are read from there. The last layer attends `plan.last_items`; where there are none of them its keys and values are written, and
        nothing is given back.
        """
        attended, end = None, None
        last = target.layer + len(layers) - 1
        for number, layer in enumerate(layers, start=target.layer):
            query = self.between_attention(
                residual,
                eps=eps,
                attended=attended,
                end=end,
                start=layer.start,
                target=replace(target, layer=number),
            )
            if number == last and plan.last_items is not None:
                if len(plan.last_items) == 0:
                    return None
                plan = replace(plan, items=plan.last_items, schedule=None)
            attended = self.attention(
                query, target.kv, layer=number, plan=plan, scale=scale, kv_scale=target.kv_scale
            ).flatten(1)
            end = layer.end
        return attended

    def after_last_attention(
        self,
        residual: torch.Tensor,
        attended: torch.Tensor,
        layers: Sequence[Layer],
        *,
        rows: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """The hidden rows [num_chosen, hidden_size] of `rows` int64 [num_chosen]: behind the last layer, normed by `norm` [hidden_size].

        `residual` and `attended`: as `to_last_attention` left and gave them; what `residual` holds afterwards is nothing.
        """
        # A fifth of the time of `[rows]`, which is meant for more.
        residual, attended = residual.index_select(0, rows), attended.index_select(0, rows)
        self.between_attention(residual, eps=eps, attended=attended, end=layers[-1].end)
        return self.rms_norm(residual, norm, eps=eps)


def pack_layers(layers: Sequence[Layer]) -> Sequence[Layer]:
    """Consecutive layers as both operations take them: where that is Python, as they are."""
    return tuple(layers)


_REFERENCE = LayerOperations(between_attention, attention, rms_norm)
to_last_attention, after_last_attention = _REFERENCE.to_last_attention, _REFERENCE.after_last_attention

_TRITON = LayerOperations(between_attention_triton, attention_triton, rms_norm_triton)
to_last_attention_triton, after_last_attention_triton = _TRITON.to_last_attention, _TRITON.after_last_attention
