"""The flow of tokens when the host waits for each step's: those that count are appended, and the sequences that end with them are answered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from batchllm.engine.answers import Answers
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.sampling import Sampled
from batchllm.engine.scheduler import Scheduler
from batchllm.engine.step import StepBatch
from batchllm.prompt import Completion


@dataclass(slots=True)
class TakenTokens:
    """The completions of the sequences that ended, and how many drafted tokens counted."""

    completions: list[Completion] = field(default_factory=list)
    num_accepted: int = 0


class StepTokens:
    """Takes the tokens of one engine's steps, each when it has run. `ahead` is the other way."""

    def __init__(self, *, scheduler: Scheduler, answers: Answers, metrics: RunMetrics, most_forced: int) -> None:
        """`most_forced`: tokens behind a sampled one that a grammar may force before the model computes them."""
        self._scheduler = scheduler
        self._answers = answers
        self._metrics = metrics
        self._most_forced = most_forced

    def take(self, hidden: torch.Tensor, batch: StepBatch, *, has_drafts: bool) -> TakenTokens:
        """Samples each of the batch's rows, whose `hidden` rows are given, appends what counts, and answers the sequences that end with it."""
        slots, table = batch.sample_slots, self._scheduler.table
        positions = batch.plan.positions[batch.sample_rows].astype(np.int64) + 1 - table.prompt_length[slots]
        sampled = self._answers.choose(hidden, slots, positions)
        taken = TakenTokens()
        # The first row of each sequence; without drafts there is one.
        first = np.arange(slots.size)
        if has_drafts:
            first = np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1]]))
            ended = self._take_drafted(batch, positions, sampled, first, taken)
        else:
            ended = self._take(slots, positions, sampled, taken)
        done = slots[first[ended]].tolist()
        if self._answers.may_force:
            unfinished = first[~ended]
            done += self._take_forced(slots[unfinished], positions[unfinished] + 1, taken)
        for slot in done:
            self._answers.remove(slot)
        if done:
            self._scheduler.finish(np.array(done, dtype=np.int64))
        return taken

    def _take(self, slots: np.ndarray, positions: np.ndarray, sampled: Sampled, taken: TakenTokens) -> np.ndarray:
        """Appends a token of each of the distinct `slots`. bool `[num_rows]`: which of them end with it."""
        good = np.flatnonzero(sampled.token_ids >= 0) if sampled.bad_rows else slice(None)
        self._scheduler.append(slots[good], sampled.token_ids[good])
        ended, completions = self._answers.take(slots, positions, sampled)
        taken.completions += completions
        return ended

    def _take_drafted(
        self, batch: StepBatch, positions: np.ndarray, sampled: Sampled, first: np.ndarray, taken: TakenTokens
    ) -> np.ndarray:
        """`_take` of sequences that may have several rows, the `first` of each given. bool, as `first`: which of them end.

        A drafted row counts if the row before it gave just the token that was drafted. So the rows of a sequence are taken in turn, the
        first ones of all sequences at once.
        """
        slots, drafted = batch.sample_slots, batch.token_ids[batch.sample_rows]
        end = np.concatenate([first[1:], [slots.size]])
        has_ended = np.zeros(first.size, dtype=bool)
        num_accepted = np.zeros(first.size, dtype=np.int64)
        rows, place = first, np.arange(first.size)
        while rows.size:
            ended = self._take(slots[rows], positions[rows], sampled.of(rows), taken)
            has_ended[place[ended]] = True
            goes_on = ~ended & (rows + 1 < end[place])
            rows, place = rows[goes_on], place[goes_on]
            is_right = sampled.token_ids[rows] == drafted[rows + 1]
            rows, place = rows[is_right] + 1, place[is_right]
            num_accepted[place] += 1
        with_drafts = np.flatnonzero(end - first > 1)
        if with_drafts.size and self._scheduler.drafter is not None:
            num_drafted = (end - first - 1)[with_drafts]
            self._scheduler.drop_drafts(slots[first[with_drafts]])
            self._scheduler.drafter.note(
                slots[first[with_drafts]], num_drafted=num_drafted, num_accepted=num_accepted[with_drafts]
            )
            taken.num_accepted = int(num_accepted.sum())
        return has_ended

    def _take_forced(self, slots: np.ndarray, positions: np.ndarray, taken: TakenTokens) -> list[int]:
        """Takes the tokens that the grammars of `slots` leave no choice in, without the model, which computes them with the next step.

        `positions` as for `Answers.choose`; only those of rows with a grammar, which are not drafted, are looked at. The slots that end.
        """
        done: list[int] = []
        for _ in range(self._most_forced):
            token_ids = self._answers.forced(slots)
            is_forced = token_ids >= 0
            slots, positions, token_ids = slots[is_forced], positions[is_forced], token_ids[is_forced]
            if not slots.size:
                break
            self._scheduler.append_forced(slots, token_ids)
            self._metrics.forced_tokens += slots.size
            ended, completions = self._answers.take(slots, positions, Sampled(token_ids))
            taken.completions += completions
            done += slots[ended].tolist()
            slots, positions = slots[~ended], positions[~ended] + 1
        return done
