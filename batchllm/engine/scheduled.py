"""`ScheduledStep`: what the scheduler hands to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class ScheduledStep:
    """The rows of one step: row counts by slot, decoding ones (one row) first, then prefill chunks; each part in plan order.

    `copies`: (source block, target block), to be done before the step. `admitted`: slots new in this step.
    """

    slots: np.ndarray
    num_rows: np.ndarray
    num_decode: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
