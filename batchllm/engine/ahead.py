"""The flow of tokens when the host runs one step ahead of them.

A step is launched, a token whose value is not known yet is counted for each sequence that it samples, and then the
tokens of the step before are taken: written where they belong, and their sequences answered where they end. A sequence
that turns out to have ended is dropped from the step that was launched meanwhile. Where a sequence ends by its length,
that is known in time, and it gets no row.

Rows whose settings need the host between two tokens (penalties, grammars, biases, log-probabilities, `min_tokens` until
they are there) end the lead: their step is waited for, and the next one starts from what is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from batchllm.engine.answers import Answers
from batchllm.engine.device_steps import DeviceSteps, SampledAhead
from batchllm.engine.sampling import LogprobEntry, Sampled
from batchllm.engine.scheduled import ScheduledStep
from batchllm.engine.scheduler import Scheduler
from batchllm.engine.step import StepBatch
from batchllm.prompt import Completion

_NOT_FINITE = "the model gave logits that are not finite"


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that runs, and the one before it, whose tokens are taken next. `hidden`: where the host samples some of its rows."""

    before: SampledAhead | None
    hidden: torch.Tensor | None
    by_host: np.ndarray


class TokensAhead:
    """Runs an engine's steps one ahead of their tokens. Owns which tokens the table counts but does not know."""

    def __init__(self, *, steps: DeviceSteps, scheduler: Scheduler, answers: Answers) -> None:
        """The scheduler must not draft. `answers` samples hidden rows on the host, notes tokens and answers the sequences that end."""
        assert scheduler.drafter is None, "drafts need the tokens before them"
        self._steps = steps
        self._scheduler = scheduler
        self._answers = answers

    def launch(self, step: ScheduledStep, batch: StepBatch) -> Launched:
        """Launches a scheduled step and counts the tokens that it will sample; `take` follows."""
        table, slots = self._scheduler.table, batch.sample_slots
        positions = (table.num_tokens[slots] - table.prompt_length[slots]).astype(np.int64)
        by_host = np.flatnonzero(~self._answers.sampler.is_free(slots, positions))
        launched, hidden = self._steps.launch(
            batch,
            row_slots=step.slots[: step.num_decode],
            positions=positions,
            sampling=self._answers.sampler.device_batch(slots, positions),
            wants_hidden=by_host.size > 0,
        )
        before, self._steps.ahead = self._steps.ahead, launched
        self._scheduler.append(slots, np.zeros(slots.size, dtype=np.int64))
        self._scheduler.hold(slots[table.num_tokens[slots] >= table.max_tokens[slots]])
        return Launched(before, hidden, by_host)

    def take(self, launched: Launched) -> list[Completion]:
        """The completions that end with the tokens of the step before; of the launched one too, where the host samples some of its rows."""
        completions = [] if launched.before is None else self._take(launched.before, {}, {})
        if launched.by_host.size:
            ahead, hidden = self._steps.ahead, launched.hidden
            assert ahead is not None and hidden is not None
            rows = launched.by_host[ahead.is_live[launched.by_host]]
            chosen = self._answers.choose(
                hidden[torch.from_numpy(rows).to(hidden.device)], ahead.slots[rows], ahead.positions[rows]
            )
            ahead.wait()[rows] = chosen.token_ids
            self._steps.ahead = None
            bad_rows = {int(rows[place]): reason for place, reason in chosen.bad_rows.items()}
            logprobs = {int(rows[place]): entry for place, entry in chosen.logprobs.items()}
            completions += self._take(ahead, bad_rows, logprobs)
        return completions

    def settle(self) -> list[Completion]:
        """Takes what is on its way, with no step launched in its place."""
        ahead, self._steps.ahead = self._steps.ahead, None
        return [] if ahead is None else self._take(ahead, {}, {})

    def drop(self, slot: int) -> None:
        """The sequence leaves its slot before it ends: a token that is on its way is forgotten, and sampled again, the same, later."""
        ahead, table = self._steps.ahead, self._scheduler.table
        if ahead is not None:
            table.num_tokens[ahead.drop(np.array([slot]))] -= 1

    def _take(
        self, taken: SampledAhead, reasons: Mapping[int, str], logprobs: Mapping[int, LogprobEntry]
    ) -> list[Completion]:
        """By row of the step: `reasons`, why a row that has no token has none, and `logprobs`."""
        table, rows = self._scheduler.table, np.flatnonzero(taken.is_live)
        slots, positions, token_ids = taken.slots[rows], taken.positions[rows], taken.wait()
        bad_rows = {int(row): reasons.get(int(row), _NOT_FINITE) for row in np.flatnonzero(token_ids < 0)}
        sampled = Sampled(token_ids, bad_rows, dict(logprobs)).of(rows)
        good = sampled.token_ids >= 0
        table.tokens[slots[good], table.prompt_length[slots[good]] + positions[good]] = sampled.token_ids[good]
        ended, completions = self._answers.take(slots, positions, sampled)
        done = slots[ended]
        for slot in done.tolist():
            self._answers.remove(slot)
        self._scheduler.finish(done)
        if self._steps.ahead is not None:
            self._steps.ahead.drop(slots[~np.isin(slots, table.running)])
        return completions
