"""Bytes of pool blocks to and from the tiers, and whether moving them pays.

On a CPU the pool is host memory: a block is one run of bytes, and the tiers copy from and to it where it lies.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

import torch

from batchllm.engine.metrics import TransferCounters
from batchllm.engine.offload import StageReuse
from batchllm.storage.cost import CostTable, Decision, Victim
from batchllm.storage.policy import NEVER
from batchllm.storage.store import TieredStore
from batchllm.storage.tier import Outcome, Transfer

_SAVE_PATIENCE_S = 0.25
"""How long a step waits for room to copy a block into before it leaves the block pinned and goes on."""


@dataclass(frozen=True, slots=True)
class TierSetup:
    """What an engine with tiers is given. `root`: the key before a first block; `persist` keeps shared blocks for later runs.

    The engines of one run's stages share a store, its costs and its counters; `reuse` is each stage's own.
    """

    store: TieredStore
    costs: CostTable
    root: bytes
    persist: bool = False
    reuse: StageReuse = StageReuse()
    counters: TransferCounters = field(default_factory=TransferCounters)


class HostMover:
    """Moves blocks of a pool in host memory. Implements `BlockMover`; owns the store until `close`, which closes it, or `detach`."""

    def __init__(self, *, pool: torch.Tensor, store: TieredStore, costs: CostTable, counters: TransferCounters) -> None:
        """`pool` as `make_pool` makes it, on the CPU."""
        assert pool.device.type == "cpu", "this mover copies host memory"
        stride = pool.stride(0) * pool.element_size()
        flat = torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage())
        self._bytes = memoryview(flat.numpy().data)
        self._stride = stride
        self.store = store
        self.costs = costs
        self.counters = counters
        self._tickets = itertools.count()
        self._loads: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._held: dict[int, Transfer] = {}
        self._ended: list[tuple[int, bool]] = []
        self._released: list[int] = []

    @property
    def is_empty(self) -> bool:
        return self.store.is_empty

    @property
    def is_quiet(self) -> bool:
        return not (self._held or self._ended or self._released) and self.store.is_quiet

    def contains(self, key: bytes) -> bool:
        return self.store.contains(key)

    def pays(self, num_blocks: int, *, recompute_tokens: int) -> bool:
        pays = is_worth_saving(self.store, self.costs, block_bytes=self._stride, recompute_tokens=recompute_tokens)
        self.counters.num_not_worth += 0 if pays else num_blocks
        return pays

    def save(self, key: bytes, block: int, *, next_use: float, recompute_tokens: int, keep: bool) -> bool:
        self.counters.num_saved += 1
        transfer = self.store.put(
            key, self._view(block), next_use=next_use, recompute_tokens=recompute_tokens, keep=keep
        )
        if not transfer.done:
            self._stall(transfer)
        if transfer.done:
            return True
        self._held[id(transfer)] = transfer
        self._pinned[id(transfer)] = block
        return False

    def load(self, key: bytes, block: int) -> int:
        ticket = next(self._tickets)
        self.counters.num_loads += 1
        transfer = self.store.get(key, self._view(block))
        # The pool has the block now: its copy in the tiers is the first to go there, and costs nothing if it is still there next time.
        self.store.set_next_use(key, NEVER)
        if transfer.done:
            self._end_load(ticket, transfer)
        else:
            self._held[id(transfer)] = transfer
            self._loads[id(transfer)] = ticket
        return ticket

    def prefetch(self, key: bytes, next_use: float) -> None:
        if not self.store.is_near(key):
            self.store.prefetch(key, next_use=next_use)

    def drop(self, key: bytes) -> None:
        self.store.drop(key)

    def poll(self, timeout_s: float) -> tuple[list[tuple[int, bool]], list[int]]:
        waits = timeout_s > 0 and not self._ended and not self._released
        started_at = time.perf_counter()
        self._reap(timeout_s if waits else 0.0)
        if waits:
            self.counters.stall_s += time.perf_counter() - started_at
        ended, self._ended = self._ended, []
        released, self._released = self._released, []
        return ended, released

    def close(self) -> None:
        """Waits for what is being written, then closes the tiers."""
        self.store.close()

    def detach(self, *, before: float) -> None:
        """Waits for what moves from or to the pool; the store stays open, without what was needed before next use `before`."""
        while self._held:
            self._reap(1.0)
        self.store.drop_before(before)

    def _stall(self, transfer: Transfer) -> None:
        started_at = time.perf_counter()
        while not transfer.done and time.perf_counter() - started_at < _SAVE_PATIENCE_S:
            self._reap(0.01)
        self.counters.stall_s += time.perf_counter() - started_at

    def _reap(self, timeout_s: float) -> None:
        for transfer in self.store.poll(timeout_s):
            if (ticket := self._loads.pop(id(transfer), None)) is not None:
                self._end_load(ticket, transfer)
            if (block := self._pinned.pop(id(transfer), None)) is not None:
                self._released.append(block)
            self._held.pop(id(transfer), None)

    def _end_load(self, ticket: int, transfer: Transfer) -> None:
        loaded = transfer.outcome is Outcome.DONE
        self.counters.num_load_misses += not loaded
        self._ended.append((ticket, loaded))

    def _view(self, block: int) -> memoryview:
        return self._bytes[block * self._stride : (block + 1) * self._stride]


def is_worth_saving(store: TieredStore, costs: CostTable, *, block_bytes: int, recompute_tokens: int) -> bool:
    """Whether a tier is worth it. The order of next uses, not their distance in seconds, says who waits for whom."""
    host, disk = store.host, store.disk
    return costs.pays(
        block_bytes,
        recompute_tokens,
        has_host=host is not None and host.num_slots > 0,
        has_disk=disk is not None and disk.num_slots > 0,
    )


def choose_by_cost(costs: CostTable, *, block_bytes: int, recompute_tokens: int) -> Decision:
    """For a block that has to leave host memory: DISK where reading it back is cheaper than computing it again, else DROP."""
    victim = Victim(block_bytes=block_bytes, recompute_tokens=recompute_tokens, next_use_s=1e9)
    return costs.decide(victim, has_host=False, has_disk=True)
