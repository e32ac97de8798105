from __future__ import annotations

import errno
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.storage.cost import Decision
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.host import HostTier
from batchllm.storage.policy import NEVER, LruPolicy, NextUsePolicy, Policy
from batchllm.storage.ring import open_queue
from batchllm.storage.store import TieredStore
from batchllm.storage.submission import Completion, Operation, SubmissionQueue
from batchllm.storage.tier import MissCause, Outcome, Transfer

BLOCK_BYTES = 5000

Finish = Callable[..., None]


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


BLOCKS = [np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8) for number in range(64)]


@dataclass
class Weather:
    """What goes wrong with the disk by chance: seconds completions are held, shares of reads and writes that fail."""

    delay_s: float = 0.0
    read_errors: float = 0.0
    write_errors: float = 0.0
    is_frozen: bool = False


class WeatherQueue:
    """A real queue in bad weather. While frozen it lets nothing complete."""

    name = "weather"

    def __init__(self, inner: SubmissionQueue, weather: Weather) -> None:
        self._inner = inner
        self._weather = weather
        self._random = random.Random(0)
        self._made_up: list[Completion] = []

    def submit(self, operation: Operation) -> None:
        share = self._weather.write_errors if operation.is_write else self._weather.read_errors
        if self._random.random() < share:
            self._made_up.append(Completion(operation.tag, -errno.ENOSPC if operation.is_write else -errno.EIO))
            self._inner.wake()
        else:
            self._inner.submit(operation)

    def begin(self) -> None:
        self._inner.begin()

    def wait(self) -> list[Completion]:
        completions = self._inner.wait() + self._made_up
        self._made_up = []
        while self._weather.is_frozen:
            time.sleep(0.002)
        if self._weather.delay_s:
            time.sleep(self._random.uniform(0, self._weather.delay_s))
            self._random.shuffle(completions)
        return completions

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


@contextmanager
def open_store(
    *,
    host_slots: int | None,
    disk_slots: int | None,
    num_spare: int = 2,
    make_policy: Callable[[], Policy] = NextUsePolicy,
    choose: Callable[..., Decision] | None = None,
    weather: Weather | None = None,
    folder: Path | None = None,
) -> Iterator[TieredStore]:
    """A store over new tiers, closed and checked at the end. `folder`: keep the disk file there."""
    scratch = folder or Path(tempfile.mkdtemp())

    def open_submissions(file_descriptor: int, depth: int) -> tuple[SubmissionQueue, str]:
        inner, note = open_queue(file_descriptor, depth)
        return WeatherQueue(inner, weather or Weather()), note

    host = disk = None
    if host_slots is not None:
        spare = num_spare if disk_slots is not None else 0
        host = HostTier(num_slots=host_slots, block_bytes=BLOCK_BYTES, num_spare=spare)
    if disk_slots is not None:
        disk = DiskTier(
            scratch,
            fingerprint=bytes(32),
            block_bytes=BLOCK_BYTES,
            num_slots=disk_slots,
            options=DiskOptions(persist=folder is not None, depth=4, retry_after_s=0.001, max_retry_after_s=0.01),
            open_submissions=open_submissions,
        )
    store = TieredStore(host=host, disk=disk, make_policy=make_policy, choose=choose)
    try:
        yield store
        settle(store)
        store.close()
    finally:
        if folder is None:
            shutil.rmtree(scratch)


def settle(store: TieredStore) -> None:
    deadline_s = time.monotonic() + 20
    while store.num_in_flight:
        assert time.monotonic() < deadline_s, "the store does not come to rest"
        store.poll(timeout_s=0.1)
    store.poll()
    store.check_integrity()


def put(store: TieredStore, number: int, *, next_use: float, keep: bool = False) -> Transfer:
    return store.put(key(number), memoryview(BLOCKS[number].copy()), next_use=next_use, keep=keep)


def get(store: TieredStore, finish: Finish, number: int) -> Transfer:
    into = np.zeros(BLOCK_BYTES, np.uint8)
    finish(store, transfer := store.get(key(number), memoryview(into)))
    assert transfer.outcome is not Outcome.DONE or np.array_equal(into, BLOCKS[number])
    return transfer


def in_host(store: TieredStore) -> list[int]:
    return [number for number in range(64) if store.host is not None and store.host.contains(key(number))]


def on_disk(store: TieredStore) -> list[int]:
    return [number for number in range(64) if store.disk is not None and store.disk.contains(key(number))]


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


def test_a_full_disk_gives_up_the_block_needed_last(finish: Finish) -> None:
    with open_store(host_slots=1, disk_slots=2) as store:
        for number in (5, 4, 3, 2, 1):
            put(store, number, next_use=float(number))
            settle(store)
        assert (in_host(store), on_disk(store)) == ([1], [2, 3])


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


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "keep", "get", "get", "prefetch", "drop", "next_use", "poll", "wait"]),
        st.integers(0, 11),
        st.one_of(st.integers(0, 30).map(float), st.just(NEVER)),
    ),
    max_size=80,
)
SLOTS = st.one_of(st.none(), st.integers(0, 4))
WEATHERS = st.sampled_from(
    [Weather(), Weather(delay_s=0.001), Weather(read_errors=0.2, write_errors=0.2), Weather(write_errors=1.0)]
)


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    slots=st.tuples(SLOTS, SLOTS).filter(lambda slots: slots != (None, None)),
    num_spare=st.integers(1, 3),
    weather=WEATHERS,
    is_lru=st.booleans(),
    is_dropping=st.booleans(),
)
def test_random_use_in_any_weather_gives_right_bytes_or_misses_and_ends(
    steps: list[tuple[str, int, float]],
    slots: tuple[int | None, int | None],
    num_spare: int,
    weather: Weather,
    is_lru: bool,
    is_dropping: bool,
) -> None:
    with open_store(
        host_slots=slots[0],
        disk_slots=slots[1],
        num_spare=num_spare,
        weather=weather,
        make_policy=LruPolicy if is_lru else NextUsePolicy,
        choose=(lambda name, use: Decision.DROP if name[0] % 3 == 0 else Decision.DISK) if is_dropping else None,
    ) as store:
        given_out: dict[int, tuple[Transfer, np.ndarray]] = {}
        gets: list[tuple[Transfer, int, np.ndarray]] = []
        was_put: set[int] = set()
        for action, number, next_use in steps:
            if action in ("put", "keep"):
                data = BLOCKS[number].copy()
                transfer = store.put(key(number), memoryview(data), next_use=next_use, keep=action == "keep")
                given_out[id(transfer)] = (transfer, data)
                was_put.add(number)
            elif action == "get":
                into = np.zeros(BLOCK_BYTES, np.uint8)
                gets.append((store.get(key(number), memoryview(into)), number, into))
            elif action == "prefetch":
                store.prefetch(key(number), next_use=next_use)
            elif action == "drop":
                store.drop(key(number))
            elif action == "next_use":
                store.set_next_use(key(number), next_use)
            else:
                for ended in store.poll(timeout_s=0.005 if action == "wait" else 0.0):
                    if id(ended) in given_out:
                        given_out.pop(id(ended))[1][:] = 0xEE
            store.check_integrity()
        settle(store)
        for transfer, number, into in gets:
            assert transfer.done
            if transfer.outcome is Outcome.DONE:
                assert number in was_put and np.array_equal(into, BLOCKS[number])
        assert not store._uses.keys() - {key(number) for number in range(12) if store.contains(key(number))}
