"""What the engine is asked to run: `SamplingParams`, `Prompt`, and what it answers: `Completion`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion must be. `kind` is what the job calls it: `schema`, `choice` or `regex`; `text` is llguidance's form of it."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one prompt is continued. Validated where it is made (`batchllm.job`); hashable, so equal ones are stored once.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 switch the filter off. `seed` None takes the job's seed.
    Penalties follow the usual meaning: repetition over prompt and output, presence and frequency over output only.
    `logprobs` is None for none, or the number of top alternatives per token (0: only the sampled token's).
    `grammar` None: free text.
    """

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One input row, tokenised. `token_ids` is int32 `[num_tokens]`, never empty."""

    row_index: int
    token_ids: np.ndarray
    sampling: SamplingParams


@dataclass(slots=True)
class Completion:
    """One finished sample of one row. Times in seconds, monotonic clock; `tpot_s` is None for fewer than two tokens.

    `finish_reason`: `eos`, `stop` (a stop string or stop id, named in `stop_reason`), `length`, or `error`.
    `logprobs` holds one entry per completion token: (token id, logprob, ((alternative id, logprob), ...)).
    """

    row_index: int
    sample_index: int = 0
    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "error"
    stop_reason: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    preemptions: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    logprobs: list[tuple[int, float, tuple[tuple[int, float], ...]]] | None = None
