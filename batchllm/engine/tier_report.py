"""What the tiers of a run did, as plain numbers for the summary and whoever asks later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from batchllm.engine.metrics import RunMetrics, TransferCounters
from batchllm.storage.cost import CostTable, Rate
from batchllm.storage.store import TieredStore
from batchllm.storage.tier import TierCounters


class Tiers(Protocol):
    """What a report reads: the tiers and what was counted around them. `TierSetup` and `HostMover` have it."""

    @property
    def store(self) -> TieredStore: ...
    @property
    def costs(self) -> CostTable: ...
    @property
    def counters(self) -> TransferCounters: ...


@dataclass(frozen=True, slots=True)
class TierUse:
    """One tier. `capacity_blocks`; bytes and blocks moved; `bytes_per_s` while it was busy beside what was measured before the run."""

    name: str
    detail: str
    capacity_blocks: int
    num_stored: int
    num_hits: int
    misses: dict[str, int]
    num_refused: int
    bytes_in: int
    bytes_out: int
    bytes_per_s: float | None
    measured_write_bytes_per_s: float | None
    measured_read_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class TierReport:
    """All tiers. `restored_tokens` did not have to be computed again, which took `stall_s` of waiting and saved about `saved_s`."""

    tiers: list[TierUse]
    num_saved: int
    num_not_worth: int
    num_loads: int
    num_load_misses: int
    restored_tokens: int
    recomputed_tokens: int
    stall_s: float
    saved_s: float | None


def report_tiers(tiers: Tiers, metrics: RunMetrics) -> TierReport:
    """The report of a run that used `tiers`."""
    store, costs, counters = tiers.store, tiers.costs, tiers.counters
    uses = []
    if store.host is not None and store.host.num_slots:
        uses.append(
            _use("host", "memory", store.host.num_slots, store.host.counters, costs.rates, Rate.COPY_OUT, Rate.COPY_IN)
        )
    if store.disk is not None:
        uses.append(
            _use(
                "disk",
                store.disk.backend,
                store.disk.num_slots,
                store.disk.counters,
                costs.rates,
                Rate.DISK_WRITE,
                Rate.DISK_READ,
            )
        )
    prefill = costs.rates.get(Rate.PREFILL)
    saved_s = metrics.restored_tokens / prefill - counters.stall_s if prefill else None
    return TierReport(
        tiers=uses,
        num_saved=counters.num_saved,
        num_not_worth=counters.num_not_worth,
        num_loads=counters.num_loads,
        num_load_misses=counters.num_load_misses,
        restored_tokens=metrics.restored_tokens,
        recomputed_tokens=metrics.recomputed_tokens,
        stall_s=counters.stall_s,
        saved_s=saved_s,
    )


def _use(
    name: str,
    detail: str,
    capacity: int,
    counters: TierCounters,
    rates: dict[Rate, float],
    write: Rate,
    read: Rate,
) -> TierUse:
    moved = counters.bytes_in + counters.bytes_out
    return TierUse(
        name=name,
        detail=detail,
        capacity_blocks=capacity,
        num_stored=counters.num_stored,
        num_hits=counters.num_hits,
        misses={cause.value: count for cause, count in counters.misses.items()},
        num_refused=counters.num_store_full + counters.num_store_failed,
        bytes_in=counters.bytes_in,
        bytes_out=counters.bytes_out,
        bytes_per_s=moved / counters.busy_s if counters.busy_s else None,
        measured_write_bytes_per_s=rates.get(write),
        measured_read_bytes_per_s=rates.get(read),
    )
