"""Figures over intervals of plan positions."""

from __future__ import annotations

import numpy as np


def interval_sum(values: np.ndarray, *, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """int64 `[M]`: sum of `values[first : last]` for each interval."""
    total = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values, dtype=np.int64)))
    return total[last] - total[first]


def interval_max(values: np.ndarray, *, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """`[M]`, dtype of `values`: greatest of `values[first : last]` for each interval, none of them empty.

    Doubling windows, of which two cover any interval: time O(N log N) however the intervals nest, memory O(N).
    """
    greatest = np.empty(len(first), dtype=values.dtype)
    size = np.asarray(last - first, dtype=np.int64)
    level = np.frexp(size.astype(np.float64))[1] - 1
    width, window = 1, values
    for number in range(int(level.max()) + 1 if len(level) else 0):
        here = np.flatnonzero(level == number)
        greatest[here] = np.maximum(window[first[here]], window[last[here] - width])
        window = np.maximum(window[:-width], window[width:])
        width *= 2
    return greatest


def interval_min(values: np.ndarray, *, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """`[M]`, dtype of `values`, signed: smallest of `values[first : last]` for each interval, none of them empty."""
    return -interval_max(-values, first=first, last=last)
