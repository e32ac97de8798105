"""What the completions of running sequences will say, from the first admission of each to its end, over preemptions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchllm.engine.blocks import num_blocks_for
from batchllm.engine.holdings import WaitingSequence
from batchllm.engine.protocols import Store
from batchllm.engine.sampling import LogprobEntry
from batchllm.engine.stopping import Finish
from batchllm.planner.plan import Plan
from batchllm.prompt import Completion, SamplingParams


@dataclass(slots=True)
class Record:
    """One sequence. Times are those of `time.monotonic()`, 0 before they are known."""

    params: SamplingParams
    row_index: int
    sample_index: int
    prompt_tokens: int
    cached_tokens: int | None = None
    restored_tokens: int = 0
    preemptions: int = 0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    logprobs: list[LogprobEntry] | None = None


class Records:
    """The records by plan position, and what came of each position."""

    def __init__(
        self, *, store: Store, plan: Plan, max_context: int, block_size: int, num_blocks: int, started_at: float
    ) -> None:
        self.generated_tokens = np.zeros(plan.num_prompts, dtype=np.int32)
        """By plan position: tokens of the samples answered so far, 0 for those that carry an error."""
        self._records: dict[int, Record] = {}
        self._refused: list[Completion] = []
        self.store = store
        self._plan = plan
        self._max_context = max_context
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._started_at = started_at

    def __getitem__(self, position: int) -> Record:
        return self._records[position]

    def load(self, position: int) -> WaitingSequence | None:
        """The sequence at a plan position; None, and an error row among the refused, if it can never run."""
        prompt = int(self._plan.order[position])
        params = self.store.sampling[int(self.store.sampling_id[prompt])]
        tokens = self.store.tokens(prompt)
        max_tokens = min(tokens.size + params.max_tokens, self._max_context)
        record = Record(
            params=params,
            row_index=int(self.store.row_index[prompt]),
            sample_index=int(self.store.sample_index[prompt]),
            prompt_tokens=tokens.size,
            logprobs=None if params.logprobs is None else [],
        )
        error = self._why_never(tokens.size, max_tokens)
        if error is not None:
            self._refused.append(
                Completion(record.row_index, record.sample_index, error=error, prompt_tokens=tokens.size)
            )
            return None
        self._records[position] = record
        return WaitingSequence(position=position, tokens=tokens, prompt_length=tokens.size, max_tokens=max_tokens)

    def take_refused(self) -> list[Completion]:
        """The error rows of sequences that could never run, once."""
        refused, self._refused = self._refused, []
        return refused

    def complete(
        self, position: int, *, now: float, token_ids: list[int], finish: Finish | None, error: str | None
    ) -> Completion:
        """The completion of a sequence that has ended, with `finish`, or with `error`; its record goes."""
        record = self._records.pop(position)
        completion = Completion(
            row_index=record.row_index,
            sample_index=record.sample_index,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens or 0,
            restored_tokens=record.restored_tokens,
            preemptions=record.preemptions,
            queue_s=record.scheduled_at - self._started_at,
            e2e_s=now - self._started_at,
            error=error,
        )
        if finish is None:
            return completion
        self.generated_tokens[position] = len(token_ids)
        completion.text = finish.text
        completion.finish_reason = finish.finish_reason
        completion.stop_reason = finish.stop_reason
        completion.token_ids = token_ids
        completion.logprobs = record.logprobs
        completion.ttft_s = record.first_token_at - record.scheduled_at
        if len(token_ids) > 1:
            completion.tpot_s = (now - record.first_token_at) / (len(token_ids) - 1)
        return completion

    def _why_never(self, num_tokens: int, max_tokens: int) -> str | None:
        # The last token generated is never read, so its KV needs no slot.
        needed = num_blocks_for(max_tokens - 1, self._block_size)
        if num_tokens >= self._max_context:
            return f"prompt has {num_tokens} tokens; the model's context of {self._max_context} leaves none to generate"
        if needed > self._num_blocks:
            return (
                f"prompt of {num_tokens} and up to {max_tokens - num_tokens} new tokens need {needed} KV blocks; "
                f"the pool has {self._num_blocks} ({self._num_blocks * self._block_size} tokens): "
                "raise engine.kv.device or lower max_tokens"
            )
        return None
