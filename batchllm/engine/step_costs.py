"""What the steps of a run cost, by their sequences and rows, and whether drafting has paid so far.

A decoding sequence costs a step the read of its keys and values and the products of its row; a row that is drafted beside it costs the products
only. So a step is taken to cost something fixed, something a row and something a token that attention reads, and what its number of rows is
worth beside that straight line: products come in tiles. All of it is fitted to the steps of the run.
"""

from __future__ import annotations

import numpy as np

_EDGES = np.array(
    [*range(1, 5), 6, 8, 12, *range(16, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 2049, 64)]
)
"""Greatest number of rows of each bucket, finer where a row more or less shows."""

_NUM_KEPT, _FEWEST_KNOWN = 9, 2
_OLD_STEPS = 1000
"""A machine's speed drifts: what was seen so many steps ago says nothing."""

_SHORTER = 0.3
"""Quantile of the steps of a size that counts."""

_FAR = 1.6
"""Times what is expected: a step that took so long was disturbed, unless the next one is so too."""

_MOST_BETWEEN = 8
"""Steps between two fits, at most; the first ones come after each step."""

_SUBSETS = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=bool)
"""Of the line's three features, the smaller ones first."""

_PRIOR_WEIGHT = 0.5
"""Of what prompt rows cost as a guess of what a row costs, beside one observed step. It decides where sequences and rows went hand in hand."""

_MOST_LOSS = 0.01
"""Share of the decoding time that drafting may lose while it learns that it does not pay here."""

_NUM_COMPARED = 3
"""Steps with drafts, and plain ones, of which the middle one counts: what disturbs the machine for one step is no loss by drafts."""

_PROMPT_STEPS = 9


class StepCosts:
    """Seconds of steps that only decode, from the latest ones of each size.

    Of a few one of the shorter counts, so that a neighbour on the machine shifts nothing for long.
    """

    def __init__(self) -> None:
        self._seconds = np.full((_EDGES.size, _NUM_KEPT), np.nan)
        self._rows = np.zeros((_EDGES.size, _NUM_KEPT))
        self._reads = np.zeros((_EDGES.size, _NUM_KEPT))
        self._seen_at = np.zeros((_EDGES.size, _NUM_KEPT), dtype=np.int64)
        self._count = np.zeros(_EDGES.size, dtype=np.int64)
        self._num_observed = self._num_fitted = 0
        self._line = np.zeros(3)
        self._known_rows = np.zeros(1)
        self._known_ratio = np.ones(1)
        self._prompt_rows_s: list[float] = []
        self._reads_each = 0.0
        self._was_far = False
        self._total_s = 0.0
        self._balance_s = 0.0
        self._gains_s: list[float] = []
        self._paces: list[float] = []

    def observe(self, *, num_sequences: int, num_rows: int, num_tokens: int, num_reads: int, seconds: float) -> None:
        """A step of `num_sequences` sequences with `num_rows` rows, of which `num_tokens` gave a token that counts; `num_reads`: tokens whose
        keys and values it read.
        """
        is_disturbed = False
        if self._num_observed:
            pace = seconds / float(self._expected(np.array([num_rows]), num_reads)[0])
            is_disturbed = self._is_disturbed(pace)
            if num_rows > num_sequences:
                self._count_gain(
                    num_sequences=num_sequences, num_tokens=num_tokens, num_reads=num_reads, seconds=seconds
                )
            else:
                self._paces = [*self._paces[1 - _NUM_COMPARED :], pace]
        self._total_s += seconds
        self._reads_each = num_reads / num_sequences
        if is_disturbed:
            return
        bucket = min(int(np.searchsorted(_EDGES, num_rows)), _EDGES.size - 1)
        place = bucket, self._count[bucket] % _NUM_KEPT
        self._seconds[place], self._rows[place], self._reads[place] = seconds, num_rows, num_reads
        self._num_observed += 1
        self._seen_at[place] = self._num_observed
        self._count[bucket] += 1
        if self._num_observed - self._num_fitted >= min(self._num_fitted // 8 + 1, _MOST_BETWEEN):
            self._fit()

    def observe_prompts(self, *, num_rows: int, seconds: float) -> None:
        """A step mostly of prompt rows."""
        self._prompt_rows_s = [*self._prompt_rows_s[1 - _PROMPT_STEPS :], seconds / num_rows]

    @property
    def may_draft(self) -> bool:
        """Whether plain steps are known to compare with, and drafting has not lost more than it may."""
        return self._num_observed >= _FEWEST_KNOWN and self._balance_s >= -_MOST_LOSS * self._total_s

    def seconds(self, num_rows: np.ndarray, *, num_sequences: int) -> np.ndarray:
        """float64, as `num_rows`, which ascend: expected seconds of steps with so many rows of `num_sequences` sequences, never less for more
        rows. At least one step was observed.
        """
        return self._expected(num_rows, num_sequences * self._reads_each)

    def _expected(self, num_rows: np.ndarray, num_reads: float) -> np.ndarray:
        fixed, row, read = self._line
        line = fixed + row * num_rows + read * num_reads
        return np.maximum.accumulate(line * np.interp(num_rows, self._known_rows, self._known_ratio))

    def _is_disturbed(self, pace: float) -> bool:
        """Whether a step took far longer, `pace` times what is expected, and the one before it did not: twice in turn it is what steps take now."""
        was_far, self._was_far = self._was_far, pace > _FAR
        return self._was_far and not was_far

    def _count_gain(self, *, num_sequences: int, num_tokens: int, num_reads: int, seconds: float) -> None:
        """What the same tokens had cost without drafts, less what they cost. Gains are not saved up for later losses.

        Without drafts they had cost what the latest plain steps say: what is expected is of the machine's better moments.
        """
        plain = float(self._expected(np.array([num_sequences]), num_reads)[0])
        if self._paces:
            plain *= sorted(self._paces)[len(self._paces) // 2]
        gain = plain * num_tokens / num_sequences - seconds
        self._gains_s = [*self._gains_s[1 - _NUM_COMPARED :], gain]
        self._balance_s += sorted(self._gains_s)[len(self._gains_s) // 2]
        self._balance_s = min(self._balance_s, _MOST_LOSS * self._total_s)

    def _fit(self) -> None:
        """The straight line and, by size, how far the middle step lies from it."""
        self._num_fitted = self._num_observed
        is_used = np.isfinite(self._seconds) & (self._seen_at > self._num_observed - _OLD_STEPS)
        seconds, rows, reads = self._seconds[is_used], self._rows[is_used], self._reads[is_used]
        # Shares of each step's own seconds, so that wide steps do not outweigh narrow ones.
        features = np.stack([np.ones(rows.size), rows, reads], axis=1) / seconds[:, None]
        prior = min(self._prompt_rows_s, default=0.0)
        scale = _PRIOR_WEIGHT * float(features[:, 1].mean()) if self._prompt_rows_s else 0.0
        features = np.concatenate([features, [[0.0, scale, 0.0]]])
        wanted = np.append(np.ones(rows.size), scale * prior)
        line = _least_squares(features, wanted)
        # Once more without what lies far off.
        error = np.abs(features @ line - wanted)
        is_near = error <= 3 * max(float(np.median(error[:-1])), 0.01)
        is_near[-1] = True
        self._line = _least_squares(features[is_near], wanted[is_near])
        expected = self._line[0] + self._line[1] * self._rows + self._line[2] * self._reads
        known = np.flatnonzero(is_used.any(axis=1))
        is_used, num = is_used[known], is_used[known].sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.sort(np.where(is_used, self._seconds[known] / expected[known], np.nan), axis=1)
        # What disturbs a step makes it longer, so the shorter ones tell.
        middle = ratio[np.arange(known.size), (_SHORTER * (num - 1)).astype(np.int64)]
        # One step that is far off says less than several.
        self._known_ratio = middle ** (num / (num + 1))
        self._known_rows = np.where(is_used, self._rows[known], 0.0).sum(axis=1) / num


def _least_squares(features: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with no negative coefficient, by trying every subset of the three features."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-30)
    product, target = (features / scale).T @ (features / scale), (features / scale).T @ wanted
    # What a subset leaves out stands alone in its equations, and is zero.
    parts = np.where(_SUBSETS[:, :, None] & _SUBSETS[:, None, :], product + 1e-9 * np.eye(3), np.eye(3))
    solutions = np.linalg.solve(parts, (_SUBSETS * target)[:, :, None])[:, :, 0]
    # By so much each lowers the sum of squares.
    gains = np.where((solutions >= 0).all(axis=1), solutions @ target, 0.0)
    best, best_gain = np.zeros(3), 0.0
    for solution, gain in zip(solutions, gains.tolist(), strict=True):
        if gain > best_gain * (1 + 1e-9):
            best, best_gain = solution, gain
    return best / scale
