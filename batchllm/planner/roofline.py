"""The least time in which this machine can do a job's work, and the share of it that a run reached.

By phase, the time is the longer of two: its arithmetic at the rate of the machine's best matrix product, and its bytes at the rate of reading
memory. The phases are added. Work is the least that the plan asks for (`PlanWork`), not what the run did: distinct prompt tokens once, weights
once a step with no more steps than there must be, and in a decode step the keys and values of a shared run once.

    prefill   arithmetic   2 x weights x prompt tokens, 4 x head size x heads x layers x pairs
              bytes        weights once for each `max_step_tokens` of them, their keys and values written
    decode    arithmetic   the same for generated tokens, and the vocabulary projection of every token that is sampled; of a row that a forced
                           token follows, its keys and values end it in the last layer
              bytes        weights and vocabulary projection once a step, keys and values read and written

What a step keeps in caches (activations, logits, the keys and values a prompt chunk reads again) counts no byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from batchllm.planner.work import PlanWork


class ModelShape(Protocol):
    """What of a model's configuration counts here."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The best moment of a few: `flops_per_s` of matrix products in one dtype, `bytes_per_s` of reading memory in order."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What of the run bounds its work: rows of a step, prompt rows and steps with decoding rows that it took, and decoding rows in them.

    A run that found keys and values of an earlier one computes fewer prompt tokens than are distinct; one that accepts drafts decodes in
    fewer steps than a sample has tokens. Then less is asked of the machine, too. `forced_tokens`: those that a grammar left no choice in, which the
    row before them is not sampled for.
    """

    max_step_tokens: int
    prefill_rows: int
    decode_steps: int
    decode_turns: int
    steps_s: float
    forced_tokens: int


@dataclass(frozen=True, slots=True)
class PhaseLimit:
    """One phase's least work and time. `limited_by`: `arithmetic` or `memory bandwidth`."""

    tokens: int
    flops: float
    num_bytes: float
    compute_s: float
    memory_s: float
    least_s: float
    limited_by: str


@dataclass(frozen=True, slots=True)
class Roofline:
    """`share`: `least_s` over `steps_s`, the seconds that the run's steps took. Rates are those the machine showed."""

    share: float
    least_s: float
    steps_s: float
    prefill: PhaseLimit
    decode: PhaseLimit
    flops_per_s: float
    bytes_per_s: float


def roofline(
    work: PlanWork, *, model: ModelShape, weight_bytes: float, kv_bytes: float, facts: RunFacts, limits: MachineLimits
) -> Roofline:
    """The least time for `work`. `weight_bytes` of one weight; `kv_bytes` of one token's keys and values in one layer."""
    layer = _layer_weights(model)
    layers = layer * model.num_layers
    head = model.hidden_size * model.vocab_size
    pair = 4.0 * model.num_heads * model.head_dim * model.num_layers
    token_kv = kv_bytes * model.num_layers

    # A prompt found in an earlier run's keys and values is not computed.
    computed = min(1.0, facts.prefill_rows / work.prompt_tokens) if work.prompt_tokens else 0.0
    prompt_tokens = work.prompt_tokens * computed
    # Behind the last layer's keys and values only the row that is sampled goes on.
    behind_kv = layer - _kv_weights(model)
    skipped = max(prompt_tokens - work.num_samples, 0.0) * behind_kv
    prefill = _phase(
        prompt_tokens,
        flops=2.0 * (layers * prompt_tokens - skipped + head * work.num_samples)
        + pair * work.prompt_pairs * computed * (model.num_layers - 1) / model.num_layers,
        num_bytes=layers * weight_bytes * -(-prompt_tokens // facts.max_step_tokens) + token_kv * prompt_tokens,
        limits=limits,
    )
    # An accepted draft shares its step's reads with the token before it.
    turns = min(1.0, facts.decode_turns / work.decode_tokens) if work.decode_tokens else 0.0
    steps = min(work.decode_steps, float(facts.decode_steps))
    forced = min(facts.forced_tokens, work.decode_tokens)
    unsampled = forced / work.decode_tokens if work.decode_tokens else 0.0
    decode = _phase(
        work.decode_tokens,
        flops=2.0 * ((layers + head) * work.decode_tokens - (behind_kv + head) * forced)
        + pair * work.decode_pairs * (1 - unsampled / model.num_layers),
        num_bytes=(layers + head) * weight_bytes * steps
        + token_kv * (work.kv_tokens_read * turns + work.decode_tokens),
        limits=limits,
    )
    least_s = prefill.least_s + decode.least_s
    return Roofline(
        share=least_s / facts.steps_s if facts.steps_s else 0.0,
        least_s=least_s,
        steps_s=facts.steps_s,
        prefill=prefill,
        decode=decode,
        flops_per_s=limits.flops_per_s,
        bytes_per_s=limits.bytes_per_s,
    )


def roofline_text(values: Mapping[str, Any]) -> str:
    """A line from the fields of a `Roofline` as plain values: what was reached, and what each phase is limited by."""
    limits = {name: values[name]["limited_by"] for name in ("prefill", "decode") if values[name]["tokens"]}
    if len(set(limits.values())) == 1 and len(limits) == 2:
        what = f"prefill and decode are limited by {limits['prefill']}"
    else:
        what = ", ".join(f"{name} by {limit}" for name, limit in limits.items()).replace(" by", " is limited by", 1)
    # It is measured in moments of its own and in the model's own type: a run can find it faster.
    limit = "can do" if values["share"] <= 1 else "did when it was measured, which was too little"
    return f"{values['share']:.0%} of what this machine {limit}; {what}"


def _layer_weights(model: ModelShape) -> int:
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.intermediate_size)


def _kv_weights(model: ModelShape) -> int:
    return 2 * model.hidden_size * model.num_kv_heads * model.head_dim


def _phase(tokens: float, *, flops: float, num_bytes: float, limits: MachineLimits) -> PhaseLimit:
    compute_s, memory_s = flops / limits.flops_per_s, num_bytes / limits.bytes_per_s
    return PhaseLimit(
        tokens=round(tokens),
        flops=flops,
        num_bytes=num_bytes,
        compute_s=compute_s,
        memory_s=memory_s,
        least_s=max(compute_s, memory_s),
        limited_by="arithmetic" if compute_s >= memory_s else "memory bandwidth",
    )
