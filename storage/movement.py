"""What the tiered store notes of a block: its future, its way to and from disk; and what it counts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from batchllm.storage.frame import Frame
from batchllm.storage.policy import NEVER
from batchllm.storage.tier import MissCause, Transfer


@dataclass(slots=True)
class BlockUse:
    """A block's future. `next_use` is in the consumer's own rising unit; `is_kept`: it must reach the disk."""

    next_use: float
    recompute_tokens: int = 0
    is_kept: bool = False

    @property
    def disk_use(self) -> float:
        """`next_use` as the disk's policy sees it: a kept block that this run is done with serves the next one."""
        return sys.float_info.max if self.is_kept and self.next_use == NEVER else self.next_use


@dataclass(slots=True, eq=False)
class Departure:
    """A block being written to disk from a spare frame; the frame is released when that ends or is refused."""

    frame: Frame
    is_refused: bool = False


@dataclass(slots=True, eq=False)
class Arrival:
    """A block on its way from disk into a reserved host frame, and who waits for it."""

    frame: Frame
    prefetches: list[Transfer]
    gets: list[tuple[Transfer, memoryview]] = field(default_factory=list)


@dataclass(slots=True)
class StoreCounters:
    """Totals since the start. Misses count by cause; `num_lost`: blocks whose way to disk failed."""

    num_puts: int = 0
    num_puts_refused: int = 0
    num_gets: int = 0
    num_host_hits: int = 0
    num_disk_hits: int = 0
    misses: dict[MissCause, int] = field(default_factory=dict)
    num_prefetches: int = 0
    num_prefetched: int = 0
    num_spills: int = 0
    num_drops: int = 0
    num_lost: int = 0
