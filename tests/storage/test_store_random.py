"""The tiered store under random use in any weather."""

from __future__ import annotations

import numpy as np
from disk_weather import Weather
from hypothesis import given, settings
from hypothesis import strategies as st
from store_weather import BLOCK_BYTES, BLOCKS, key, open_store, settle

from batchllm.storage.cost import Decision
from batchllm.storage.policy import NEVER, LruPolicy, NextUsePolicy
from batchllm.storage.tier import Outcome, Transfer

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
                was_quiet = store.is_quiet
                for ended in store.poll(timeout_s=0.005 if action == "wait" else 0.0):
                    assert not was_quiet, "a quiet store has nothing to tell"
                    if id(ended) in given_out:
                        given_out.pop(id(ended))[1][:] = 0xEE
            store.check_integrity()
            assert not store.is_empty or not any(store.contains(key(number)) for number in range(12))
        settle(store)
        assert store.is_quiet
        for transfer, number, into in gets:
            assert transfer.done
            if transfer.outcome is Outcome.DONE:
                assert number in was_put and np.array_equal(into, BLOCKS[number])
        assert not store._uses.keys() - {key(number) for number in range(12) if store.contains(key(number))}
