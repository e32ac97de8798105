"""What the steps of a run cost, by their number of rows, and whether drafting has paid so far."""

from __future__ import annotations

import numpy as np

_EDGES = np.array(
    [*range(1, 5), 6, 8, 12, *range(16, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 2049, 64)]
)
"""Greatest number of rows of each bucket, finer where a row more or less shows."""

_NUM_KEPT = 9
_MOST_LOSS = 0.01
"""Share of the decoding time that drafting may lose while it learns that it does not pay here."""


class StepCosts:
    """Seconds of steps that only decode, from the latest ones of each size; a step of unknown size costs as the next known ones say.

    The middle one of a few counts, so that a neighbour on the machine shifts nothing for long.
    """

    def __init__(self) -> None:
        self._kept = np.full((_EDGES.size, _NUM_KEPT), np.nan)
        self._count = np.zeros(_EDGES.size, dtype=np.int64)
        self._median = np.full(_EDGES.size, np.nan)
        self._total_s = 0.0
        self._balance_s = 0.0

    def observe(self, *, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of `num_sequences` sequences with `num_rows` rows, of which `num_tokens` gave a token that counts."""
        if num_rows > num_sequences:
            plain = float(self.seconds(np.array([num_sequences]))[0])
            # What the same tokens had cost without drafts. Gains are not saved up for later losses.
            self._balance_s += plain * num_tokens / num_sequences - seconds
            self._balance_s = min(self._balance_s, _MOST_LOSS * self._total_s)
        self._total_s += seconds
        bucket = min(int(np.searchsorted(_EDGES, num_rows)), _EDGES.size - 1)
        self._kept[bucket, self._count[bucket] % _NUM_KEPT] = seconds
        self._count[bucket] += 1
        self._median[bucket] = np.nanmedian(self._kept[bucket])

    @property
    def may_draft(self) -> bool:
        """Whether a plain step is known to compare with, and drafting has not lost more than it may."""
        return bool(self._count.any()) and self._balance_s >= -_MOST_LOSS * self._total_s

    def seconds(self, num_rows: np.ndarray) -> np.ndarray:
        """float64, as `num_rows`: expected seconds, never less for more rows. Beyond the largest known size it costs as much as there.

        At least one step was observed.
        """
        known = np.flatnonzero(self._count)
        values = np.maximum.accumulate(self._median[known])
        buckets = np.minimum(np.searchsorted(_EDGES, num_rows), _EDGES.size - 1)
        return np.interp(_EDGES[buckets], _EDGES[known], values)
