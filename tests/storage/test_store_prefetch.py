"""The tiered store: blocks that are brought near, and who waits for them."""

from __future__ import annotations

import numpy as np
import pytest
from disk_weather import Weather
from store_weather import BLOCK_BYTES, Finish, get, in_host, key, on_disk, open_store, put, settle

from batchllm.storage.tier import MissCause, Outcome


def test_a_prefetched_block_is_near_when_it_has_arrived(finish: Finish) -> None:
    with open_store(host_slots=2, disk_slots=10) as store:
        for number in range(4):
            put(store, number, next_use=float(number))
        settle(store)
        store.drop(key(0))
        assert not store.is_near(key(3))
        finish(store, fetched := store.prefetch(key(3), next_use=3.0))
        assert fetched.outcome is Outcome.DONE and store.is_near(key(3))
        num_disk_loads = store.disk.counters.num_loads if store.disk is not None else 0
        assert get(store, finish, 3).outcome is Outcome.DONE
        assert store.disk is not None and store.disk.counters.num_loads == num_disk_loads


def test_a_prefetch_never_displaces_a_block_needed_sooner(finish: Finish) -> None:
    with open_store(host_slots=2, disk_slots=10) as store:
        for number in range(3):
            put(store, number, next_use=float(number))
        settle(store)
        finish(store, refused := store.prefetch(key(2), next_use=2.0))
        assert refused.outcome is Outcome.FULL and in_host(store) == [0, 1]
        finish(store, taken := store.prefetch(key(2), next_use=0.5))
        settle(store)
        assert taken.outcome is Outcome.DONE and in_host(store) == [0, 2]


def test_a_get_during_a_prefetch_is_served_by_it(finish: Finish) -> None:
    weather = Weather(delay_s=0.02)
    with open_store(host_slots=2, disk_slots=10, weather=weather) as store:
        for number in range(3):
            put(store, number, next_use=float(number))
        settle(store)
        fetched = [store.prefetch(key(2), next_use=0.5) for _ in range(2)]
        assert get(store, finish, 2).outcome is Outcome.DONE
        finish(store, *fetched)
        assert store.disk is not None and store.disk.counters.num_loads == 1
        assert [transfer.outcome for transfer in fetched] == [Outcome.DONE] * 2


@pytest.mark.parametrize("read_errors", [0.0, 1.0])
def test_a_put_of_a_block_that_is_arriving_waits_and_survives_a_failed_arrival(
    finish: Finish, read_errors: float
) -> None:
    weather = Weather()
    with open_store(host_slots=2, disk_slots=1, weather=weather) as store:
        for number in range(3):
            put(store, number, next_use=float(number))
        settle(store)
        assert (in_host(store), on_disk(store)) == ([0, 1], [2])
        weather.is_frozen, weather.read_errors = True, read_errors
        store.drop(key(0))
        store.prefetch(key(2), next_use=2.0)
        put(store, 3, next_use=1.5)  # takes the last place in the host, or the disk slot that is being read
        put(store, 4, next_use=1.0)
        put(store, 2, next_use=0.5)
        store.check_integrity()
        weather.is_frozen = False
        settle(store)
        assert get(store, finish, 2).outcome is Outcome.DONE


def test_prefetching_what_is_nowhere_is_a_miss(finish: Finish) -> None:
    with open_store(host_slots=2, disk_slots=2) as store:
        finish(store, transfer := store.prefetch(key(7), next_use=1.0))
        assert (transfer.outcome, transfer.cause) == (Outcome.MISS, MissCause.ABSENT)


def test_a_failed_prefetch_ends_all_who_wait_and_frees_its_frame(finish: Finish) -> None:
    weather = Weather()
    with open_store(host_slots=1, disk_slots=8, weather=weather) as store:
        put(store, 0, next_use=9.0)
        put(store, 1, next_use=1.0)
        settle(store)
        weather.read_errors = 1.0
        fetched = store.prefetch(key(0), next_use=0.5)
        into = np.zeros(BLOCK_BYTES, np.uint8)
        finish(store, fetched, waiting := store.get(key(0), memoryview(into)))
        assert (fetched.outcome, waiting.outcome) == (Outcome.FAILED, Outcome.FAILED)
        settle(store)
