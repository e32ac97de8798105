"""The tiered store over its disk: what is kept, what fails, what is lost."""

from __future__ import annotations

import errno
from pathlib import Path

from disk_weather import Weather
from store_weather import BLOCKS, Finish, get, in_host, key, on_disk, open_store, put, settle

from batchllm.storage.tier import MissCause, Outcome


def test_a_full_disk_gives_up_the_block_needed_last(finish: Finish) -> None:
    with open_store(host_slots=1, disk_slots=2) as store:
        for number in (5, 4, 3, 2, 1):
            put(store, number, next_use=float(number))
            settle(store)
        assert (in_host(store), on_disk(store)) == ([1], [2, 3])


def test_a_block_already_on_disk_leaves_the_host_without_another_write() -> None:
    with open_store(host_slots=1, disk_slots=4) as store:
        put(store, 0, next_use=5.0, keep=True)
        settle(store)
        assert (in_host(store), on_disk(store)) == ([0], [0])
        put(store, 1, next_use=1.0)
        settle(store)
        assert (in_host(store), on_disk(store)) == ([1], [0])
        assert store.disk is not None and store.disk.counters.num_stored == 1


def test_blocks_to_keep_are_there_for_the_next_run_even_if_dropped_before(tmp_path: Path, finish: Finish) -> None:
    with open_store(host_slots=8, disk_slots=8, folder=tmp_path) as store:
        for number in range(6):
            put(store, number, next_use=float(number), keep=number < 4)
            store.drop(key(number))
    with open_store(host_slots=8, disk_slots=8, folder=tmp_path) as store:
        assert [number for number in range(6) if store.contains(key(number))] == [0, 1, 2, 3]
        assert [get(store, finish, number).outcome for number in range(4)] == [Outcome.DONE] * 4
        finish(store, fetched := store.prefetch(key(0), next_use=1.0))
        assert fetched.outcome is Outcome.DONE


def test_a_full_kept_disk_gives_up_what_this_run_did_not_use(tmp_path: Path, finish: Finish) -> None:
    with open_store(host_slots=8, disk_slots=4, folder=tmp_path) as store:
        for number in range(4):
            put(store, number, next_use=float(number), keep=True)
    with open_store(host_slots=8, disk_slots=4, folder=tmp_path) as store:
        assert get(store, finish, 2).outcome is Outcome.DONE
        store.drop(key(2))
        for number in (10, 11, 12):
            put(store, number, next_use=1.0, keep=True)
            store.drop(key(number))
    with open_store(host_slots=8, disk_slots=4, folder=tmp_path) as store:
        assert [number for number in range(20) if store.contains(key(number))] == [2, 10, 11, 12]


def test_a_disk_that_takes_nothing_costs_blocks_and_nothing_else(finish: Finish) -> None:
    with open_store(host_slots=2, disk_slots=8, weather=Weather(write_errors=1.0)) as store:
        begun = [put(store, number, next_use=float(-number)) for number in range(10)]
        settle(store)
        assert all(transfer.done for transfer in begun)
        assert in_host(store) == [8, 9] and on_disk(store) == []
        assert store.counters.num_lost > 0
        assert get(store, finish, 9).outcome is Outcome.DONE
        assert get(store, finish, 0).outcome is Outcome.MISS


def test_a_put_again_after_a_refusal_is_written_from_its_own_memory(finish: Finish) -> None:
    weather = Weather(delay_s=0.01)
    with open_store(host_slots=0, disk_slots=1, num_spare=1, weather=weather) as store:
        put(store, 0, next_use=1.0)
        settle(store)
        refused = put(store, 1, next_use=9.0)
        assert refused.outcome is Outcome.FULL
        taken = put(store, 1, next_use=0.0)  # sooner than block 0, before the refusal has been polled
        store.poll()
        store.check_integrity()
        store.put(key(2), memoryview(BLOCKS[2].copy()), next_use=-1.0)
        settle(store)
        assert taken.outcome is Outcome.DONE and on_disk(store) == [2]
        assert get(store, finish, 2).outcome is Outcome.DONE


def test_a_block_that_cannot_be_read_is_a_miss_by_its_cause(finish: Finish) -> None:
    weather = Weather()
    with open_store(host_slots=1, disk_slots=8, weather=weather) as store:
        put(store, 0, next_use=9.0)
        put(store, 1, next_use=1.0)
        settle(store)
        weather.read_errors = 1.0
        transfer = get(store, finish, 0)
        assert (transfer.outcome, transfer.errno) == (Outcome.FAILED, errno.EIO)
        assert store.counters.misses == {MissCause.IO_ERROR: 1}
        assert not store.contains(key(0))


def test_a_block_damaged_in_host_memory_before_it_is_written_is_a_miss(finish: Finish) -> None:
    with open_store(host_slots=1, disk_slots=8) as store:
        put(store, 0, next_use=9.0)
        assert store.host is not None
        store.host.frame(key(0)).payload[77] ^= 1
        put(store, 1, next_use=1.0)
        settle(store)
        transfer = get(store, finish, 0)
        assert (transfer.outcome, transfer.cause) == (Outcome.CORRUPT, MissCause.CHECKSUM)
