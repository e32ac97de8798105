"""Blocks that reach the tiers through slots of host memory, by copies that end late; on a GPU where there is one."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from batchllm.engine.device_copies import BlockCopies, CudaCopies
from batchllm.engine.metrics import TransferCounters
from batchllm.engine.pool import KvShape, make_pool
from batchllm.engine.staged_mover import StagedMover
from batchllm.storage.cost import CostTable, Rate
from batchllm.storage.host import HostTier
from batchllm.storage.store import TieredStore

SHAPE = KvShape(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)
BLOCK_BYTES = SHAPE.block_bytes(4)
ALWAYS_PAYS = dict.fromkeys((Rate.COPY_IN, Rate.COPY_OUT, Rate.DISK_READ, Rate.DISK_WRITE), 1e15)


class LateCopy:
    """A copy that ends when it was looked at often enough, or is waited for; `work` is done only then."""

    def __init__(self, num_looks: int, work: Callable[[], object] = lambda: None) -> None:
        self._num_looks = num_looks
        self._work: Callable[[], object] | None = work

    @property
    def done(self) -> bool:
        self._num_looks -= 1
        if self._num_looks < 0:
            self.wait()
        return self._work is None

    def wait(self) -> None:
        if self._work is not None:
            self._work()
            self._work = None


class LateCopies:
    """The order of `BlockCopies` on a pool in host memory: out of a block at once, since it may be used again, into a block at the end."""

    def __init__(self, pool: torch.Tensor, *, num_slots: int, seed: int = 0) -> None:
        self.num_slots = num_slots
        self.block_bytes = pool.stride(0) * pool.element_size()
        storage = torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage())
        self._blocks = storage.view(-1, self.block_bytes)
        self._slots = torch.full((num_slots, self.block_bytes), 255, dtype=torch.uint8)
        self._random = random.Random(seed)

    def view(self, slot: int) -> memoryview:
        return memoryview(self._slots[slot].numpy().data)

    def to_host(self, block: int, slot: int) -> LateCopy:
        bytes_now = self._blocks[block].clone()
        return LateCopy(self._random.randrange(4), lambda: self._slots[slot].copy_(bytes_now))

    def to_device(self, slot: int, block: int) -> LateCopy:
        return LateCopy(self._random.randrange(4), lambda: self._blocks[block].copy_(self._slots[slot]))


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def open_mover(copies: BlockCopies, *, host_slots: int = 100) -> StagedMover:
    store = TieredStore(host=HostTier(num_slots=host_slots, block_bytes=BLOCK_BYTES), disk=None)
    return StagedMover(copies=copies, store=store, costs=CostTable(dict(ALWAYS_PAYS)), counters=TransferCounters())


def wait_for(mover: StagedMover, tickets: set[int]) -> dict[int, bool]:
    ended: dict[int, bool] = {}
    deadline_s = time.monotonic() + 10
    while not tickets <= ended.keys():
        assert time.monotonic() < deadline_s, "a load did not end"
        loads, released = mover.poll(0.1)
        assert released == [], "nothing stays pinned"
        ended.update(loads)
    return ended


def check_round_trips(pool: torch.Tensor, mover: StagedMover, *, num_blocks: int) -> None:
    """Save the first half of the pool, overwrite it at once, load it into the second half."""
    half = num_blocks // 2
    expected = torch.randn(pool[:half].shape, generator=torch.Generator().manual_seed(1)).to(pool.device)
    for number in range(half):
        pool[number] = expected[number]
        assert mover.save(key_of(number), number, next_use=number, recompute_tokens=4, keep=False)
        pool[number] = -1.0
        assert mover.contains(key_of(number))
    tickets = {mover.load(key_of(number), half + number): number for number in range(half)}
    assert wait_for(mover, set(tickets)) == dict.fromkeys(tickets, True)
    assert torch.equal(pool[half:num_blocks], expected)
    assert torch.equal(pool[:half], torch.full_like(expected, -1.0))
    mover.store.check_integrity()
    mover.close()
    assert mover.counters.num_saved == mover.counters.num_loads == half
    assert mover.counters.num_load_misses == 0


@pytest.mark.parametrize("num_slots", [1, 2, 64])
def test_a_block_that_is_overwritten_at_once_comes_back_as_it_was(num_slots: int) -> None:
    pool = make_pool(SHAPE, num_blocks=40, block_size=4, device=torch.device("cpu"))
    check_round_trips(pool, open_mover(LateCopies(pool, num_slots=num_slots)), num_blocks=40)


def test_on_a_gpu_a_block_that_is_overwritten_at_once_comes_back_as_it_was() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: pinned memory, streams and events")
    pool = make_pool(SHAPE, num_blocks=400, block_size=4, device=torch.device("cuda"))
    check_round_trips(pool, open_mover(CudaCopies(pool, num_slots=8), host_slots=300), num_blocks=400)


def test_a_block_is_not_reported_before_it_is_in_the_pool() -> None:
    pool = make_pool(SHAPE, num_blocks=20, block_size=4, device=torch.device("cpu"))
    mover = open_mover(LateCopies(pool, num_slots=8, seed=3))
    pool[:10] = torch.arange(10.0).view(-1, 1, 1, 1, 1, 1)
    for number in range(10):
        mover.save(key_of(number), number, next_use=number, recompute_tokens=4, keep=False)
    tickets = {mover.load(key_of(number), 10 + number): number for number in range(8)}
    seen: set[int] = set()
    while seen != set(tickets):
        for ticket, is_there in mover.poll(0.0)[0]:
            assert is_there and bool((pool[10 + tickets[ticket]] == tickets[ticket]).all())
            seen.add(ticket)
    mover.close()


def test_a_block_that_is_nowhere_is_a_miss_and_takes_no_slot_for_good() -> None:
    pool = make_pool(SHAPE, num_blocks=4, block_size=4, device=torch.device("cpu"))
    mover = open_mover(LateCopies(pool, num_slots=1))
    pool[0] = 7.0
    for _ in range(5):
        ticket = mover.load(key_of(9), 1)
        assert wait_for(mover, {ticket}) == {ticket: False}
    mover.save(key_of(0), 0, next_use=0, recompute_tokens=4, keep=False)
    ticket = mover.load(key_of(0), 2)
    assert wait_for(mover, {ticket}) == {ticket: True}
    assert bool((pool[2] == 7.0).all())
    assert mover.counters.num_load_misses == 5
    mover.close()


def test_a_dropped_block_is_gone_even_if_it_was_still_on_its_way() -> None:
    pool = make_pool(SHAPE, num_blocks=4, block_size=4, device=torch.device("cpu"))
    mover = open_mover(LateCopies(pool, num_slots=2))
    mover.save(key_of(0), 0, next_use=0, recompute_tokens=4, keep=False)
    mover.drop(key_of(0))
    assert not mover.contains(key_of(0))
    mover.close()


@pytest.mark.parametrize("num_slots", [1, 5, 64])
@pytest.mark.parametrize("place", ["host", "disk", "host over disk"])
def test_rows_are_the_same_through_slots_that_fill_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier_job: ModuleType, num_slots: int, place: str
) -> None:
    movers: list[StagedMover] = []

    def make_mover(
        *, pool: torch.Tensor, store: TieredStore, costs: CostTable, counters: TransferCounters
    ) -> StagedMover:
        movers.append(
            StagedMover(copies=LateCopies(pool, num_slots=num_slots), store=store, costs=costs, counters=counters)
        )
        return movers[-1]

    decoder = tier_job.make_decoder()
    expected = tier_job.run(decoder, None, num_tokens=4000).rows
    monkeypatch.setattr("batchllm.engine.engine.HostMover", make_mover)
    host = {"host": 300, "disk": 0, "host over disk": 4}[place]
    tiers = tier_job.Tiers(host=host, disk=300, folder=None if place == "host" else tmp_path)
    ran = tier_job.run(decoder, tiers)
    assert ran.rows == expected
    assert ran.restored_tokens > 100 and ran.num_load_misses == 0
    assert movers[0].counters.num_saved > 0
