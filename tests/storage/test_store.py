"""The tiered store: which block lies where, and that each call ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from disk_weather import Weather
from store_weather import BLOCK_BYTES, BLOCKS, Finish, get, in_host, key, on_disk, open_store, put, settle

from batchllm.storage.cost import Decision
from batchllm.storage.disk import DiskTier
from batchllm.storage.host import HostTier
from batchllm.storage.policy import LruPolicy
from batchllm.storage.store import TieredStore
from batchllm.storage.tier import MissCause, Outcome, Transfer


def test_a_full_host_tier_spills_the_blocks_needed_last(finish: Finish) -> None:
    with open_store(host_slots=3, disk_slots=10) as store:
        for number, next_use in enumerate([5.0, 50.0, 10.0, 40.0, 20.0]):
            put(store, number, next_use=next_use)
        settle(store)
        assert (in_host(store), on_disk(store)) == ([0, 2, 4], [1, 3])
        assert [get(store, finish, number).outcome for number in range(5)] == [Outcome.DONE] * 5
        assert (store.counters.num_host_hits, store.counters.num_disk_hits) == (3, 2)


def test_a_block_needed_later_than_all_others_goes_past_the_host_to_disk() -> None:
    with open_store(host_slots=2, disk_slots=10) as store:
        for number, next_use in enumerate([1.0, 2.0, 99.0]):
            put(store, number, next_use=next_use)
        settle(store)
        assert (in_host(store), on_disk(store)) == ([0, 1], [2])


def test_the_least_recently_used_block_leaves_under_lru(finish: Finish) -> None:
    with open_store(host_slots=2, disk_slots=10, make_policy=LruPolicy) as store:
        put(store, 0, next_use=1.0)
        put(store, 1, next_use=2.0)
        get(store, finish, 0)
        put(store, 2, next_use=99.0)
        settle(store)
        assert (in_host(store), on_disk(store)) == ([0, 2], [1])


@pytest.mark.parametrize("host_slots", [None, 0, 1])
@pytest.mark.parametrize("disk_slots", [None, 0, 1])
def test_stores_of_no_or_one_slot_end_every_call(
    finish: Finish, host_slots: int | None, disk_slots: int | None
) -> None:
    if host_slots is None and disk_slots is None:
        with pytest.raises(ValueError, match="needs a tier"):
            TieredStore(host=None, disk=None)
        return
    with open_store(host_slots=host_slots, disk_slots=disk_slots, num_spare=1) as store:
        begun = [put(store, number, next_use=float(number)) for number in range(6)]
        settle(store)
        assert all(transfer.outcome in (Outcome.DONE, Outcome.FULL) for transfer in begun)
        num_found = sum(get(store, finish, number).outcome is Outcome.DONE for number in range(6))
        assert num_found == (host_slots or 0) + (disk_slots or 0)
        assert store.prefetch(key(0), next_use=0.0).done or store.num_in_flight
        settle(store)


def test_without_a_disk_the_block_needed_last_is_given_up(finish: Finish) -> None:
    with open_store(host_slots=2, disk_slots=None) as store:
        for number, next_use in enumerate([1.0, 9.0, 2.0]):
            put(store, number, next_use=next_use)
        assert in_host(store) == [0, 2]
        assert get(store, finish, 1).outcome is Outcome.MISS
        assert store.counters.misses == {MissCause.ABSENT: 1}
        assert store.counters.num_drops == 1


def test_a_put_into_a_host_tier_takes_the_bytes_at_once(finish: Finish) -> None:
    with open_store(host_slots=1, disk_slots=4) as store:
        for number in (0, 1):
            data = BLOCKS[number].copy()
            assert store.put(key(number), memoryview(data), next_use=float(-number)).done
            data[:] = 0xEE
        assert [get(store, finish, number).outcome for number in (0, 1)] == [Outcome.DONE] * 2


def test_calls_return_at_once_while_the_disk_stands_still(finish: Finish) -> None:
    weather = Weather(is_frozen=True)
    with open_store(host_slots=2, disk_slots=40, num_spare=2, weather=weather) as store:
        data = [block.copy() for block in BLOCKS[:20]]
        began_s = time.monotonic()
        # Each block is needed sooner than all before it, so each put displaces one.
        begun = [store.put(key(n), memoryview(block), next_use=float(-n)) for n, block in enumerate(data)]
        store.poll()
        store.check_integrity()
        assert time.monotonic() - began_s < 1.0
        assert 0 < sum(transfer.done for transfer in begun) < 20, "some wait for room"
        for number in range(20):  # in a slot, on its way to disk, or waiting for room
            assert get(store, finish, number).outcome is Outcome.DONE
        threading.Timer(0.05, lambda: setattr(weather, "is_frozen", False)).start()
        settle(store)
        assert all(transfer.outcome is Outcome.DONE for transfer in begun)
        assert [get(store, finish, number).outcome for number in range(20)] == [Outcome.DONE] * 20


def test_a_dropped_block_frees_its_host_slot_at_once() -> None:
    with open_store(host_slots=2, disk_slots=4) as store:
        for number in range(2):
            put(store, number, next_use=float(number))
        store.drop(key(0))
        put(store, 2, next_use=50.0)
        settle(store)
        assert (in_host(store), on_disk(store)) == ([1, 2], [])
        assert store.counters.num_spills == 0


def test_new_next_uses_change_the_victim() -> None:
    with open_store(host_slots=2, disk_slots=4) as store:
        put(store, 0, next_use=1.0)
        put(store, 1, next_use=2.0)
        store.set_next_use(key(0), 100.0)
        put(store, 2, next_use=3.0)
        settle(store)
        assert (in_host(store), on_disk(store)) == ([1, 2], [0])


def test_a_victim_that_is_not_worth_the_disk_is_dropped(finish: Finish) -> None:
    asked: list[tuple[bytes, int]] = []

    def choose(name: bytes, use: object) -> Decision:
        asked.append((name, getattr(use, "recompute_tokens", -1)))
        return Decision.DROP

    with open_store(host_slots=1, disk_slots=4, choose=choose) as store:
        store.put(key(0), memoryview(BLOCKS[0].copy()), next_use=9.0, recompute_tokens=48)
        put(store, 1, next_use=1.0)
        settle(store)
        assert asked == [(key(0), 48)]
        assert (in_host(store), on_disk(store)) == ([1], [])
        assert get(store, finish, 0).outcome is Outcome.MISS


def test_every_handle_is_returned_by_exactly_one_poll() -> None:
    with open_store(host_slots=1, disk_slots=3) as store:
        begun = [put(store, number, next_use=float(-number)) for number in range(6)]
        buffers = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(6)]
        begun += [store.get(key(number), memoryview(into)) for number, into in enumerate(buffers)]
        begun += [store.prefetch(key(number), next_use=0.0) for number in range(6)]
        polled: list[Transfer] = []
        while store.num_in_flight or len(polled) < len(begun):
            polled += store.poll(timeout_s=1.0)
        assert sorted(map(id, polled)) == sorted(map(id, begun))


def test_a_host_tier_over_a_disk_without_spare_frames_is_refused(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, fingerprint=bytes(32), block_bytes=BLOCK_BYTES, num_slots=1)
    with pytest.raises(ValueError, match="spare frame"):
        TieredStore(host=HostTier(num_slots=1, block_bytes=BLOCK_BYTES), disk=disk)
    disk.close()
