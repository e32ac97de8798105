"""What a row has seen and what it asks for, per token id: the state of penalties, logit bias and `min_tokens`.

All of it is sparse: a row that uses none of these holds nothing, and one that does holds its distinct tokens, not the
vocabulary. The state is a function of the row's prompt and output tokens, so a preempted or resumed row is rebuilt to
the same by `add`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_FIRST_WIDTH = 16


def _grown(table: np.ndarray, *, shape: tuple[int, int]) -> np.ndarray:
    """`table` in the upper left corner of a zeroed table of at least `shape`, doubled so that growing is rare."""
    if shape[0] <= table.shape[0] and shape[1] <= table.shape[1]:
        return table
    size = [have if want <= have else max(want, 2 * have) for want, have in zip(shape, table.shape, strict=True)]
    grown = np.zeros(size, dtype=table.dtype)
    grown[: table.shape[0], : table.shape[1]] = table
    return grown


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """Flat entries of a batch: `rows` int64 (places in it), `token_ids` int64, one value each. No (row, id) twice."""

    rows: np.ndarray
    token_ids: np.ndarray
    values: np.ndarray


class SeenTokens:
    """The distinct tokens of each slot and how often it generated them: 0 for those of the prompt only."""

    def __init__(self) -> None:
        self._lengths = np.zeros(0, dtype=np.int64)
        self._token_ids = np.zeros((0, _FIRST_WIDTH), dtype=np.int64)
        self._counts = np.zeros((0, _FIRST_WIDTH), dtype=np.int64)

    def add(self, slot: int, *, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """Start `slot` from its tokens, whatever it held before."""
        generated, counts = np.unique(np.asarray(output_ids, dtype=np.int64), return_counts=True)
        only_prompt = np.setdiff1d(np.asarray(prompt_ids, dtype=np.int64), generated)
        length = len(generated) + len(only_prompt)
        self._reserve(slot + 1, length)
        self._token_ids[slot, :length] = np.concatenate([generated, only_prompt])
        self._counts[slot, :length] = np.concatenate([counts, np.zeros_like(only_prompt)])
        self._lengths[slot] = length

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Count one generated token for each of the (distinct) slots."""
        if not len(slots):
            return
        lengths = self._lengths[slots]
        self._reserve(0, int(lengths.max()) + 1)
        width = int(lengths.max())
        known = (self._token_ids[slots, :width] == token_ids[:, None]) & (np.arange(width) < lengths[:, None])
        is_known = known.any(axis=1)
        places = np.where(is_known, known.argmax(axis=1) if width else 0, lengths)
        self._counts[slots, places] = np.where(is_known, self._counts[slots, places], 0) + 1
        self._token_ids[slots, places] = token_ids
        self._lengths[slots] = lengths + ~is_known

    def entries(self, slots: np.ndarray) -> TokenEntries:
        """The tokens of these slots; `rows` counts in `slots`, the values are the counts."""
        lengths = self._lengths[slots]
        width = int(lengths.max(initial=0))
        rows, places = np.nonzero(np.arange(width) < lengths[:, None])
        return TokenEntries(
            rows=rows, token_ids=self._token_ids[slots[rows], places], values=self._counts[slots[rows], places]
        )

    def _reserve(self, num_slots: int, width: int) -> None:
        shape = (num_slots, width)
        self._token_ids = _grown(self._token_ids, shape=shape)
        self._counts = _grown(self._counts, shape=shape)
        self._lengths = _grown(self._lengths[:, None], shape=(self._token_ids.shape[0], 1))[:, 0]


class TokenOffsets:
    """What is added to single logits of each slot: its bias, and -inf for ids that `min_tokens` forbids so far."""

    def __init__(self) -> None:
        self._lengths = np.zeros(0, dtype=np.int64)
        self._token_ids = np.zeros((0, _FIRST_WIDTH), dtype=np.int64)
        self._bias = np.zeros((0, _FIRST_WIDTH), dtype=np.float64)
        self._min_tokens = np.zeros((0, _FIRST_WIDTH), dtype=np.int64)

    def add(self, slot: int, *, logit_bias: dict[int, float], masked_ids: tuple[int, ...], min_tokens: int) -> None:
        """Start `slot`, whatever it held before. `masked_ids` are forbidden before `min_tokens` tokens."""
        masked = frozenset(masked_ids) if min_tokens else frozenset()
        token_ids = sorted(masked | set(logit_bias))
        length = len(token_ids)
        shape = (slot + 1, length)
        self._token_ids = _grown(self._token_ids, shape=shape)
        self._bias = _grown(self._bias, shape=shape)
        self._min_tokens = _grown(self._min_tokens, shape=shape)
        self._lengths = _grown(self._lengths[:, None], shape=(self._token_ids.shape[0], 1))[:, 0]
        self._token_ids[slot, :length] = token_ids
        self._bias[slot, :length] = [logit_bias.get(token_id, 0.0) for token_id in token_ids]
        self._min_tokens[slot, :length] = [min_tokens if token_id in masked else 0 for token_id in token_ids]
        self._lengths[slot] = length

    def entries(self, slots: np.ndarray, positions: np.ndarray) -> TokenEntries:
        """The offsets of these slots after `positions` generated tokens; `rows` counts in `slots`."""
        lengths = self._lengths[slots]
        width = int(lengths.max(initial=0))
        rows, places = np.nonzero(np.arange(width) < lengths[:, None])
        owners = slots[rows]
        forbidden = positions[rows] < self._min_tokens[owners, places]
        values = np.where(forbidden, -np.inf, self._bias[owners, places])
        return TokenEntries(rows=rows, token_ids=self._token_ids[owners, places], values=values)
