"""How many sequences run at once so that a batch whose lengths are certain ends together, as it goes.

A plan says how many do if each sequence generates a token a step. Drafts give some of them several, and the one that is never guessed right
decides when the batch ends: the others are then done early and it runs on alone. So what each still needs is counted in steps, at the pace
that it showed, and no more sequences run than are needed beside the slowest.
"""

from __future__ import annotations

import math

import numpy as np

from batchllm.engine.sequences import SequenceTable

_MARGIN = 1.05
"""Over what would end together: a pace can fall, and then rows that were held back would come last."""

_UNKNOWN_STEPS = 16
"""Steps at a token each that a sequence begins its record with."""

_FORGET = 0.97
"""Of the record of finished sequences, with each that finishes."""


class Pacing:
    """Owns the record of how many tokens a step gives."""

    def __init__(self, *, table: SequenceTable, decode_tokens: np.ndarray, fewest: int) -> None:
        """`decode_tokens` int `[N]` by plan position, each generated for certain. No fewer than `fewest` are held to be worth a step."""
        self._table = table
        self._fewest = fewest
        self._decode_tokens = decode_tokens
        self._tokens_from = np.append(np.cumsum(decode_tokens[::-1], dtype=np.int64)[::-1], 0)
        self._first_step = np.zeros(table.max_sequences, dtype=np.int64)
        self._first_tokens = np.zeros(table.max_sequences, dtype=np.int64)
        self._tokens = self._steps = float(_UNKNOWN_STEPS)

    def begin(self, slot: int, *, step: int) -> None:
        """A sequence was admitted in this step of the scheduler."""
        self._first_step[slot] = step
        self._first_tokens[slot] = self._table.num_tokens[slot]

    def finish(self, slots: np.ndarray, *, step: int) -> None:
        """These are done: the step gave them their last token."""
        tokens, steps = self._records(slots, step + 1)
        for num_tokens, num_steps in zip(tokens.tolist(), steps.tolist(), strict=True):
            self._tokens = self._tokens * _FORGET + num_tokens
            self._steps = self._steps * _FORGET + num_steps

    def most_running(self, *, next_position: int, tokens_put_back: int, step: int) -> int:
        """So many at once end with the slowest that runs. `tokens_put_back`: what those that wait for another time will generate."""
        table, running = self._table, self._table.running
        if not running.size:
            return table.max_sequences
        tokens, steps = self._records(running, step)
        pace = (tokens + _UNKNOWN_STEPS) / (steps + _UNKNOWN_STEPS)
        needed = (table.max_tokens[running] - table.num_tokens[running]) / np.maximum(pace, 1.0)
        per_token = min(self._steps / self._tokens, 1.0)
        waiting = (int(self._tokens_from[next_position]) + tokens_put_back) * per_token
        # Rows that start when others end leave, at the end, gaps of about half of one.
        next_tokens = int(self._decode_tokens[next_position]) if next_position < self._decode_tokens.size else 0
        left = max(float(needed.max()) - next_tokens * per_token / 2, 1.0)
        enough = (float(needed.sum()) + waiting) / left
        return min(max(math.ceil(_MARGIN * enough), self._fewest), table.max_sequences)

    def _records(self, slots: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens since admission, and steps before `step`."""
        tokens = self._table.num_tokens[slots] - self._first_tokens[slots]
        return tokens, np.maximum(step - self._first_step[slots], 1)
