"""`ScheduledStep`: what the scheduler hands to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class ScheduledStep:
    """The rows of one step: row counts by slot, decoding ones first (a row, and one for each forced or drafted token), then prefill chunks.

    Each part is in plan order.
    `copies`: (source block, target block), to be done before the step. `admitted`: slots new in this step.
    """

    slots: np.ndarray
    num_rows: np.ndarray
    num_decode: int
    num_forced: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)

    @property
    def num_decode_rows(self) -> int:
        """Rows of the decoding sequences, of which `num_forced` compute forced tokens."""
        return int(self.num_rows[: self.num_decode].sum())

    @property
    def num_drafted(self) -> int:
        """Rows that compute drafted tokens."""
        return self.num_decode_rows - self.num_decode - self.num_forced
