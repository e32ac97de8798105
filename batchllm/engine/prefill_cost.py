"""What computing prompt rows again would cost, from the steps of the run."""

from __future__ import annotations

from collections import deque

from batchllm.storage.cost import CostTable, Rate

_NUM_PLAIN = 9
_NUM_ROWS = 512
"""Prompt rows that are one observation: few rows say little, as a step is not timed to the microsecond."""

_LEAST_S = 1e-9


class PrefillCost:
    """Tells a cost table the rate at which prompt rows are computed, beside what their steps would have cost without them.

    A row that is computed again rides in a step that is run anyway, for the rows that decode and for those that no tier has: the step's
    fixed cost (its launches, the model's weights that are read once) is not saved by restoring the row.
    """

    def __init__(self, costs: CostTable) -> None:
        self.plain_s: deque[float] = deque(maxlen=_NUM_PLAIN)
        """The model's seconds in steps that only decode, the latest ones. The engine appends to it in each such step."""
        self._costs = costs
        self._num_rows = 0
        self._num_steps = 0
        self._seconds = 0.0

    def observe(self, *, num_prefill: int, seconds: float) -> None:
        """A step mostly of prompt rows: their number, and the model's seconds."""
        self._num_rows += num_prefill
        self._num_steps += 1
        self._seconds += seconds
        if self._num_rows < _NUM_ROWS:
            return
        plain_s = sorted(self.plain_s)[len(self.plain_s) // 2] if self.plain_s else 0.0
        added_s = max(self._seconds - self._num_steps * plain_s, _LEAST_S)
        self._costs.observe(Rate.PREFILL, amount=self._num_rows, seconds=added_s)
        self._num_rows, self._num_steps, self._seconds = 0, 0, 0.0
