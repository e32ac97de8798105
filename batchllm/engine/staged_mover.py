"""Bytes of pool blocks to and from the tiers where the pool is not host memory: through slots of host memory, by copies that run beside
the computing.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass

from batchllm.engine.device_copies import BlockCopies, Copy
from batchllm.engine.metrics import TransferCounters
from batchllm.engine.transfer import is_worth_saving
from batchllm.storage.cost import CostTable
from batchllm.storage.policy import NEVER
from batchllm.storage.store import TieredStore
from batchllm.storage.tier import Outcome, Transfer


@dataclass(frozen=True, slots=True)
class _Saving:
    """A block on its way from the pool to a slot; then it is put under its key."""

    slot: int
    copy: Copy
    next_use: float
    recompute_tokens: int
    keep: bool


@dataclass(slots=True)
class _Loading:
    """A block on its way from the store to a slot (`copy` is None), or from there to the pool."""

    ticket: int
    block: int
    slot: int
    transfer: Transfer
    copy: Copy | None = None


class StagedMover:
    """Implements `BlockMover` over `copies`; owns the store until `close`, which closes it, or `detach`.

    A block that is saved may be used again at once (see `BlockCopies`), so none stays pinned. `save` and `load` wait when every slot is
    taken, for what is under way and needs nobody else.
    """

    def __init__(
        self, *, copies: BlockCopies, store: TieredStore, costs: CostTable, counters: TransferCounters
    ) -> None:
        assert copies.num_slots > 0, "blocks move through slots"
        self.store = store
        self.costs = costs
        self.counters = counters
        self._copies = copies
        self._tickets = itertools.count()
        self._free = deque(range(copies.num_slots))
        self._saving: dict[bytes, _Saving] = {}
        self._putting: dict[int, tuple[Transfer, int]] = {}
        self._loading: list[_Loading] = []
        self._ended: list[tuple[int, bool]] = []

    @property
    def is_empty(self) -> bool:
        return not self._saving and self.store.is_empty

    @property
    def is_quiet(self) -> bool:
        return not (self._saving or self._putting or self._loading or self._ended) and self.store.is_quiet

    def contains(self, key: bytes) -> bool:
        return key in self._saving or self.store.contains(key)

    def pays(self, num_blocks: int, *, recompute_tokens: int) -> bool:
        pays = is_worth_saving(
            self.store, self.costs, block_bytes=self._copies.block_bytes, recompute_tokens=recompute_tokens
        )
        self.counters.num_not_worth += 0 if pays else num_blocks
        return pays

    def save(self, key: bytes, block: int, *, next_use: float, recompute_tokens: int, keep: bool) -> bool:
        self.counters.num_saved += 1
        self._settle(key)
        slot = self._take_slot()
        self._saving[key] = _Saving(slot, self._copies.to_host(block, slot), next_use, recompute_tokens, keep)
        return True

    def load(self, key: bytes, block: int) -> int:
        ticket = next(self._tickets)
        self.counters.num_loads += 1
        self._settle(key)
        slot = self._take_slot()
        transfer = self.store.get(key, self._copies.view(slot))
        # As with a pool in host memory: the pool has the block now, and its copy in the tiers is the first to go there.
        self.store.set_next_use(key, NEVER)
        self._loading.append(_Loading(ticket, block, slot, transfer))
        self._go_on()
        return ticket

    def prefetch(self, key: bytes, next_use: float) -> None:
        if key not in self._saving and not self.store.is_near(key):
            self.store.prefetch(key, next_use=next_use)

    def drop(self, key: bytes) -> None:
        self._settle(key)
        self.store.drop(key)

    def poll(self, timeout_s: float) -> tuple[list[tuple[int, bool]], list[int]]:
        self._advance(0.0)
        if timeout_s > 0 and not self._ended:
            started_at = time.perf_counter()
            self._advance(timeout_s)
            self.counters.stall_s += time.perf_counter() - started_at
        ended, self._ended = self._ended, []
        return ended, []

    def close(self) -> None:
        """Waits for what is under way, then closes the tiers."""
        self._finish()
        self.store.close()

    def detach(self, *, before: float) -> None:
        """Waits for what moves from or to the pool; the store stays open, without what was needed before next use `before`."""
        self._finish()
        self.store.drop_before(before)

    def _finish(self) -> None:
        while self._saving or self._putting or self._loading:
            self._advance(1.0)

    def _take_slot(self) -> int:
        if not self._free:
            started_at = time.perf_counter()
            while not self._free:
                self._advance(0.01)
            self.counters.stall_s += time.perf_counter() - started_at
        return self._free.popleft()

    def _advance(self, timeout_s: float) -> None:
        """Moves everything on; waits for one copy, or up to `timeout_s` for the tiers."""
        copies = [loading.copy for loading in self._loading if loading.copy is not None]
        copies += [saving.copy for saving in self._saving.values()]
        if timeout_s > 0 and copies:
            copies[0].wait()
            timeout_s = 0.0
        for key in [key for key, saving in self._saving.items() if saving.copy.done]:
            self._put(key)
        for transfer in self.store.poll(timeout_s):
            self._free_slot_of(transfer)
        self._go_on()

    def _settle(self, key: bytes) -> None:
        """What is being saved under this key is in the store's hands."""
        if key in self._saving:
            self._saving[key].copy.wait()
            self._put(key)

    def _put(self, key: bytes) -> None:
        saving = self._saving.pop(key)
        transfer = self.store.put(
            key,
            self._copies.view(saving.slot),
            next_use=saving.next_use,
            recompute_tokens=saving.recompute_tokens,
            keep=saving.keep,
        )
        self._putting[id(transfer)] = transfer, saving.slot
        if transfer.done:
            self._free_slot_of(transfer)

    def _free_slot_of(self, transfer: Transfer) -> None:
        if (putting := self._putting.pop(id(transfer), None)) is not None:
            self._free.append(putting[1])

    def _go_on(self) -> None:
        """Loads whose bytes have come go on to the pool, and those that are there end."""
        still: list[_Loading] = []
        for loading in self._loading:
            if loading.copy is None and loading.transfer.outcome is Outcome.DONE:
                loading.copy = self._copies.to_device(loading.slot, loading.block)
            is_loaded = loading.copy is not None and loading.copy.done
            if is_loaded or (loading.copy is None and loading.transfer.done):
                self.counters.num_load_misses += not is_loaded
                self._ended.append((loading.ticket, is_loaded))
                self._free.append(loading.slot)
            else:
                still.append(loading)
        self._loading = still
