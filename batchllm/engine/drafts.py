"""Prompt lookup: tokens that a row may generate next, guessed from what followed the same words earlier in its prompt and output.

A drafted row runs in the step as more rows of its sequence, and each position is sampled as it would be without drafts. So a draft changes
the time, never the tokens: the first token that differs is still the right one, and what comes behind it is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchllm.engine.sequences import SequenceTable
from batchllm.engine.step_costs import StepCosts

_FEWEST_MATCHED, _MOST_MATCHED = 3, 8
"""Tokens at the end of a row that must stand earlier in it, and how many more decide between several places."""

_MOST_DRAFTED = 15
_WORTH = 1.03
"""By how much the expected tokens a second must grow."""

_FEWEST_ACCEPTED = 0.15
_FORGET, _RECOVER = 0.8, 0.98

_MOST_IN_TURN = 32
"""Steps with drafts after which one goes without, so that what a plain step costs stays known."""

_WIDE, _REST = 32, 8
"""So many sequences for which drafting does not pay are not asked again for so many steps: asking takes time itself.

In such a batch a row whose end stands nowhere earlier is searched again one step later, then two, up to as many.
"""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens of decoding sequences: `counts` int64, one for each of the sequences asked for; `token_ids` int32, theirs in turn."""

    counts: np.ndarray
    token_ids: np.ndarray


def look_up(tokens: np.ndarray, *, most: int) -> np.ndarray:
    """Up to `most` tokens that may follow `tokens` int32 `[n]`: what followed the latest of the longest earlier matches of its end.

    A match that reaches into the end goes on in circles, as a text does that repeats itself.
    """
    size = tokens.size
    if most < 1 or size <= _FEWEST_MATCHED:
        return tokens[:0]
    places = np.flatnonzero(tokens[_FEWEST_MATCHED - 1 : -1] == tokens[-1]) + _FEWEST_MATCHED - 1
    for back in range(1, _FEWEST_MATCHED):
        places = places[tokens[places - back] == tokens[-1 - back]]
    if not places.size:
        return tokens[:0]
    for back in range(_FEWEST_MATCHED, _MOST_MATCHED):
        longer = places[places >= back]
        longer = longer[tokens[longer - back] == tokens[-1 - back]]
        if not longer.size:
            break
        places = longer
    place = int(places[-1])
    return tokens[place + 1 + np.arange(most) % (size - 1 - place)]


class Drafter:
    """Who drafts how much in a step. By slot it keeps how well the drafts of the running rows went."""

    def __init__(self, table: SequenceTable, *, always: int | None) -> None:
        """`always`: so many tokens a row in every step, whatever it costs; None: as many as pay."""
        self._costs = StepCosts()
        self._table = table
        self._always = always
        self._can_draft = np.zeros(table.max_sequences, dtype=bool)
        self._hits = np.zeros(table.max_sequences)
        self._tries = np.zeros(table.max_sequences)
        self._pause = np.zeros(table.max_sequences, dtype=np.int64)
        self._paused_left = np.zeros(table.max_sequences, dtype=np.int64)
        self._num_in_turn = 0
        self._num_resting = 0

    def add(self, slot: int, *, can_draft: bool) -> None:
        """A sequence begins in `slot`; nothing is known of its drafts."""
        self._can_draft[slot] = can_draft
        self._hits[slot], self._tries[slot] = 1.0, 2.0
        self._pause[slot] = self._paused_left[slot] = 0

    def propose(self, slots: np.ndarray, *, limits: np.ndarray, num_rows: int, num_prefill: int) -> Drafts | None:
        """Drafts for the decoding `slots`, each up to `limits` tokens and `num_rows` together; None where none pays.

        `num_prefill`: other rows of the step. Beside them a row costs its full share, so nothing is drafted then.
        """
        is_auto = self._always is None
        limits = np.where(self._can_draft[slots], np.minimum(limits, self._always or _MOST_DRAFTED), 0)
        if is_auto:
            if num_prefill or not self._costs.may_draft or self._rests():
                return None
            limits = self._worth_asking(slots, limits, num_rows)
        if not limits.any():
            return None
        table = self._table
        found = [
            look_up(table.tokens[slot, : table.num_tokens[slot]], most=limit) if limit else table.tokens[slot, :0]
            for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True)
        ]
        counts = np.array([draft.size for draft in found], dtype=np.int64)
        if is_auto:
            if slots.size >= _WIDE:
                self._pause_missed(slots[limits > 0], is_missed=counts[limits > 0] == 0)
            counts = self._worth(counts, self._hits[slots] / self._tries[slots], num_rows)
        else:
            counts = np.minimum(counts, np.maximum(num_rows - (np.cumsum(counts) - counts), 0))
        if not counts.any():
            return None
        self._num_in_turn += 1
        return Drafts(counts, np.concatenate([draft[:count] for draft, count in zip(found, counts, strict=True)]))

    def note(self, slots: np.ndarray, *, num_drafted: np.ndarray, num_accepted: np.ndarray) -> None:
        """How the drafts of `slots` went. Behind the first token that differs nothing was tried."""
        self._hits[slots] = self._hits[slots] * _FORGET + num_accepted
        self._tries[slots] = self._tries[slots] * _FORGET + num_accepted + (num_accepted < num_drafted)

    def note_step(self, *, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """What a step that only decodes took: see `StepCosts.observe`."""
        if self._always is None:
            self._costs.observe(num_sequences=num_sequences, num_rows=num_rows, num_tokens=num_tokens, seconds=seconds)

    def _worth_asking(self, slots: np.ndarray, limits: np.ndarray, num_rows: int) -> np.ndarray:
        """How much would be drafted for each if its text had it: what is not worth running need not be looked for."""
        rate = self._hits[slots] / self._tries[slots]
        is_bad, is_paused = rate < _FEWEST_ACCEPTED, self._paused_left[slots] > 0
        self._paused_left[slots[is_paused]] -= 1
        # A row may come to its quotations late.
        self._tries[slots[is_bad]] *= _RECOVER
        limits = self._worth(np.where(is_bad | is_paused, 0, limits), rate, num_rows)
        self._num_resting = _REST if slots.size >= _WIDE and not limits.any() else 0
        return limits

    def _pause_missed(self, slots: np.ndarray, *, is_missed: np.ndarray) -> None:
        self._pause[slots] = np.where(is_missed, np.clip(2 * self._pause[slots], 1, _REST), 0)
        self._paused_left[slots] = self._pause[slots]

    def _rests(self) -> bool:
        if self._num_resting:
            self._num_resting -= 1
            return True
        if self._num_in_turn >= _MOST_IN_TURN:
            self._num_in_turn = 0
            return True
        return False

    def _worth(self, limits: np.ndarray, rate: np.ndarray, num_rows: int) -> np.ndarray:
        """How much of drafts of `limits` tokens to run: those likeliest to count, as many as give most tokens a second."""
        num_sequences = limits.size
        depth = np.arange(1, int(limits.max(initial=0)) + 1)
        likely = np.where(depth <= limits[:, None], rate[:, None] ** depth, 0.0)
        owners, depths = np.nonzero(likely)
        best_first = np.argsort(-likely[owners, depths], kind="stable")[:num_rows]
        if not best_first.size:
            return np.zeros_like(limits)
        tokens = num_sequences + np.cumsum(likely[owners, depths][best_first])
        speed = tokens / self._costs.seconds(num_sequences + np.arange(1, best_first.size + 1))
        best = int(speed.argmax())
        if speed[best] < _WORTH * num_sequences / self._costs.seconds(np.array([num_sequences]))[0]:
            return np.zeros_like(limits)
        return np.bincount(owners[best_first[: best + 1]], minlength=num_sequences).astype(np.int64)
