"""Prompt lookup: where the end of a row's text stands earlier in it, for all rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FEWEST_MATCHED, MOST_MATCHED = 3, 8
"""Tokens at the end of a row that must stand earlier in it, and how many are looked at where several places have them."""

_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Matches:
    """Of each row, int64: `place` of the last token of the match, -1 without one, and `length`, the tokens that are equal, at most
    `MOST_MATCHED`; 0 without one.
    """

    place: np.ndarray
    length: np.ndarray


def find_matches(tokens: np.ndarray, num_tokens: np.ndarray) -> Matches:
    """The latest of the longest earlier matches of each row's end. `tokens` int32 `[rows, width]`, of which the first `num_tokens` count."""
    num_rows, width = tokens.shape
    found = Matches(np.full(num_rows, -1, dtype=np.int64), np.zeros(num_rows, dtype=np.int64))
    at_once = max(1, _TOKENS_AT_ONCE // max(width, 1))
    for first in range(0, num_rows, at_once):
        part = slice(first, first + at_once)
        _find(tokens[part], num_tokens[part].astype(np.int64), found.place[part], found.length[part])
    return found


def continuations(tokens: np.ndarray, *, num_tokens: np.ndarray, place: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int32: for each row in turn, the `counts` tokens that followed its match at `place`. A match that reaches into the end goes on in circles, as a
    text does that repeats itself.
    """
    rows = np.repeat(np.arange(counts.size), counts)
    offset = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return tokens[rows, place[rows] + 1 + offset % (num_tokens[rows] - 1 - place[rows])]


def _find(tokens: np.ndarray, num_tokens: np.ndarray, place: np.ndarray, length: np.ndarray) -> None:
    """Writes into `place` and `length`."""
    last = num_tokens - 1
    rows, places = np.nonzero(tokens == tokens[np.arange(len(tokens)), last][:, None])
    is_there = (places < last[rows]) & (places >= FEWEST_MATCHED - 1)
    rows, places = rows[is_there], places[is_there]
    for back in range(1, FEWEST_MATCHED):
        is_there = tokens[rows, places - back] == tokens[rows, last[rows] - back]
        rows, places = rows[is_there], places[is_there]
    if not rows.size:
        return
    matched = np.full(rows.size, FEWEST_MATCHED, dtype=np.int64)
    going_on = np.arange(rows.size)
    for back in range(FEWEST_MATCHED, MOST_MATCHED):
        going_on = going_on[places[going_on] >= back]
        going_on = going_on[
            tokens[rows[going_on], places[going_on] - back] == tokens[rows[going_on], last[rows[going_on]] - back]
        ]
        matched[going_on] += 1
    # Rows come one after the other: of each the longest match, and of equal ones the latest.
    begin = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    best = np.maximum.reduceat(matched * tokens.shape[1] + places, begin)
    place[rows[begin]], length[rows[begin]] = best % tokens.shape[1], best // tokens.shape[1]
