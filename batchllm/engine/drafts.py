"""Who drafts how much in a step: tokens that a row may generate next, guessed from what followed the same words earlier in its text.

A drafted row runs in the step as more rows of its sequence, and each position is sampled as it would be without drafts. So a draft changes
the time, never the tokens: the first token that differs is still the right one, and what comes behind it is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchllm.engine.prompt_lookup import MOST_MATCHED, continuations, find_matches
from batchllm.engine.sequences import SequenceTable
from batchllm.engine.step_costs import StepCosts

_MOST_DRAFTED = 15
_WORTH = 1.03
"""By how much the expected tokens a second must grow."""

_ACCEPTED_AT_FIRST = (0.0, 0.0, 0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
"""Share of drafted tokens that count, by the length of the match, before a run knows better, and by how many tries that is weighed."""
_TRIES_AT_FIRST = 8.0

_FORGET, _FORGET_LENGTH = 0.8, 0.998
"""Of a row's record with each draft, and of that of a length of matches."""

_RECOVER = 0.98
"""Of the record of a row whose match is not worth a draft, with each step: a text may come to its quotations late."""

_WEIGHT_OF_LENGTH = 4.0
"""Tries of a row's own record that the record of its match's length is worth."""

_FIRST_IN_TURN, _MOST_IN_TURN = 2, 32
"""Steps with drafts after which one goes without, so that what a plain step costs stays known: few at first, then twice as many each time."""

_WIDE, _REST = 32, 8
"""So many sequences for which no draft would pay, however sure, are not asked again for so many steps: asking takes time itself."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens of decoding sequences: `counts` int64, one for each of the sequences asked for; `token_ids` int32, theirs in turn."""

    counts: np.ndarray
    token_ids: np.ndarray


class Drafter:
    """By slot it keeps how well the drafts of the running rows went, and over all rows how well matches of each length did."""

    def __init__(self, table: SequenceTable, *, always: int | None) -> None:
        """`always`: so many tokens a row in every step, whatever it costs; None: as many as pay."""
        self._costs = StepCosts()
        self._table = table
        self._always = always
        self._can_draft = np.zeros(table.max_sequences, dtype=bool)
        self._hits = np.zeros(table.max_sequences)
        self._tries = np.zeros(table.max_sequences)
        self._matched = np.zeros(table.max_sequences, dtype=np.int64)
        self._length_tries = np.full(MOST_MATCHED + 1, _TRIES_AT_FIRST)
        self._length_hits = _TRIES_AT_FIRST * np.array(_ACCEPTED_AT_FIRST)
        self._num_in_turn, self._in_turn = 0, _FIRST_IN_TURN
        self._num_resting = 0

    def add(self, slot: int, *, can_draft: bool) -> None:
        """A sequence begins in `slot`; nothing is known of its drafts."""
        self._can_draft[slot] = can_draft
        self._hits[slot] = self._tries[slot] = 0.0

    def propose(self, slots: np.ndarray, *, limits: np.ndarray, num_rows: int, num_prefill: int) -> Drafts | None:
        """Drafts for the decoding `slots`, each up to `limits` tokens and `num_rows` together; None where none pays.

        `num_prefill`: prompt rows of the step. Where drafts must pay there are none beside them: a drafted row takes nearly twice there what it
        takes in a step that only decodes (`docs/log.md`).
        """
        is_auto = self._always is None
        limits = np.where(self._can_draft[slots], np.minimum(limits, self._always or _MOST_DRAFTED), 0)
        if num_rows < 1 or not limits.any():
            return None
        if is_auto and (num_prefill or not self._costs.may_draft or self._rests()):
            return None
        table = self._table
        num_tokens = table.num_tokens[slots].astype(np.int64)
        tokens = table.tokens[slots, : int(num_tokens.max())]
        matches = find_matches(tokens, num_tokens)
        self._matched[slots] = matches.length
        limits = np.where(matches.place >= 0, limits, 0)
        if is_auto:
            counts = self._worth(limits, self._likely(slots), num_rows)
            self._note_refused(slots[(limits > 0) & (counts == 0)])
            if slots.size >= _WIDE and not counts.any():
                would_pay = self._worth(np.ones_like(limits), np.ones(slots.size), num_rows).any()
                self._num_resting = 0 if would_pay else _REST
        else:
            counts = np.minimum(limits, np.maximum(num_rows - (np.cumsum(limits) - limits), 0))
        if not counts.any():
            return None
        self._num_in_turn += 1
        return Drafts(counts, continuations(tokens, num_tokens=num_tokens, place=matches.place, counts=counts))

    def note(self, slots: np.ndarray, *, num_drafted: np.ndarray, num_accepted: np.ndarray) -> None:
        """How the drafts of `slots` went. Behind the first token that differs nothing was tried."""
        tries = num_accepted + (num_accepted < num_drafted)
        self._hits[slots] = self._hits[slots] * _FORGET + num_accepted
        self._tries[slots] = self._tries[slots] * _FORGET + tries
        size, lengths = MOST_MATCHED + 1, self._matched[slots]
        kept = _FORGET_LENGTH ** np.bincount(lengths, minlength=size)
        self._length_hits = self._length_hits * kept + np.bincount(lengths, weights=num_accepted, minlength=size)
        self._length_tries = self._length_tries * kept + np.bincount(lengths, weights=tries, minlength=size)

    def note_step(
        self, *, num_sequences: int, num_rows: int, num_tokens: int, num_reads: int, num_prefill: int, seconds: float
    ) -> None:
        """What a step took: see `StepCosts`. `num_prefill`: its prompt rows, beside `num_rows` others."""
        if self._always is not None:
            return
        if num_prefill > num_rows:
            self._costs.observe_prompts(num_rows=num_prefill + num_rows, seconds=seconds)
        elif num_prefill == 0 and num_sequences:
            self._costs.observe(
                num_sequences=num_sequences,
                num_rows=num_rows,
                num_tokens=num_tokens,
                num_reads=num_reads,
                seconds=seconds,
            )

    def _likely(self, slots: np.ndarray) -> np.ndarray:
        """How likely a drafted token counts if the one before it did: by the row's own record and that of its match's length."""
        by_length = (self._length_hits / self._length_tries)[self._matched[slots]]
        return (self._hits[slots] + _WEIGHT_OF_LENGTH * by_length) / (self._tries[slots] + _WEIGHT_OF_LENGTH)

    def _note_refused(self, slots: np.ndarray) -> None:
        self._hits[slots] *= _RECOVER
        self._tries[slots] *= _RECOVER

    def _rests(self) -> bool:
        if self._num_resting:
            self._num_resting -= 1
            return True
        if self._num_in_turn >= self._in_turn:
            self._num_in_turn, self._in_turn = 0, min(2 * self._in_turn, _MOST_IN_TURN)
            return True
        return False

    def _worth(self, limits: np.ndarray, likely: np.ndarray, num_rows: int) -> np.ndarray:
        """How much of drafts of `limits` tokens to run: those likeliest to count, as many as give most tokens a second."""
        num_sequences = limits.size
        depth = np.arange(1, int(limits.max(initial=0)) + 1)
        chance = np.where(depth <= limits[:, None], likely[:, None] ** depth, 0.0)
        owners, depths = np.nonzero(chance)
        best_first = np.argsort(-chance[owners, depths], kind="stable")[:num_rows]
        if not best_first.size:
            return np.zeros_like(limits)
        tokens = num_sequences + np.append(0.0, np.cumsum(chance[owners, depths][best_first]))
        rows = num_sequences + np.arange(tokens.size)
        speed = tokens / self._costs.seconds(rows, num_sequences=num_sequences)
        best = int(speed.argmax())
        if speed[best] < _WORTH * speed[0]:
            return np.zeros_like(limits)
        return np.bincount(owners[best_first[:best]], minlength=num_sequences).astype(np.int64)
