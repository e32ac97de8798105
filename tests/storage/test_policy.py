from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.storage.policy import NEVER, LruPolicy, NextUsePolicy, Policy

KEYS = st.sampled_from([bytes([letter]) for letter in range(8)])
USES = st.one_of(st.integers(0, 20).map(float), st.just(NEVER))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), KEYS, USES),
        st.tuples(st.just("remove"), KEYS, USES),
        st.tuples(st.just("victim"), KEYS, USES),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_next_use_always_gives_up_a_key_with_the_farthest_use(steps: list[tuple[str, bytes, float]]) -> None:
    policy, truth = NextUsePolicy(), dict[bytes, float]()
    for action, key, use in steps:
        if action == "touch":
            policy.touch(key, use)
            truth[key] = use
        elif action == "remove":
            policy.remove(key)
            truth.pop(key, None)
        else:
            victim = policy.victim(use)
            farthest = max(truth.values(), default=-1.0)
            assert (victim is not None) == (farthest > use)
            assert victim is None or truth[victim] == farthest
        assert len(policy) == len(truth)
        assert all((name in policy) == (name in truth) for name in (key,))


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_lru_gives_up_the_key_touched_longest_ago_and_dead_ones_first(steps: list[tuple[str, bytes, float]]) -> None:
    policy, order = LruPolicy(), list[bytes]()
    for action, key, use in steps:
        if action == "victim":
            assert policy.victim(use) == (order[0] if order else None)
            continue
        if key in order:
            order.remove(key)
        if action == "touch":
            order.insert(0 if use == NEVER else len(order), key)
            policy.touch(key, use)
        else:
            policy.remove(key)
        assert len(policy) == len(order)


def hits(make_policy: Callable[[], Policy], trace: list[int], *, capacity: int) -> int:
    """Replays accesses of a cache with `capacity` places that admits by the policy's word."""
    next_use, following = dict[int, float](), list[float]()
    for position in reversed(range(len(trace))):
        following.append(next_use.get(trace[position], NEVER))
        next_use[trace[position]] = float(position)
    following.reverse()
    policy, num_hits = make_policy(), 0
    for name, use in zip(trace, following, strict=True):
        key = bytes([name])
        if key in policy:
            num_hits += 1
        elif len(policy) >= capacity:
            victim = policy.victim(use)
            if victim is None:
                continue
            policy.remove(victim)
        policy.touch(key, use)
    return num_hits


def best_hits(trace: list[int], *, capacity: int) -> int:
    """The most hits any choice can give, by trying all sets of cached names."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for name in trace:
        following: dict[frozenset[int], int] = {}
        for cached, num in states.items():
            if name in cached:
                choices = [(cached, num + 1)]
            else:
                choices = [(cached, num)]
                choices += [(cached | {name}, num)] if len(cached) < capacity else []
                choices += [((cached - {out}) | {name}, num) for out in cached]
            for state, value in choices:
                following[state] = max(following.get(state, -1), value)
        states = following
    return max(states.values())


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_next_use_hits_as_often_as_the_best_possible_choice(capacity: int) -> None:
    for seed in range(30):
        trace = random.Random(seed).choices(range(6), k=20)
        assert hits(NextUsePolicy, trace, capacity=capacity) == best_hits(trace, capacity=capacity)


def test_next_use_never_hits_less_than_lru() -> None:
    for seed in range(40):
        trace = random.Random(seed).choices(range(20), weights=range(1, 21), k=400)
        for capacity in (2, 5, 10, 18):
            assert hits(NextUsePolicy, trace, capacity=capacity) >= hits(LruPolicy, trace, capacity=capacity)


def test_many_touches_of_few_keys_do_not_grow_the_heap() -> None:
    policy = NextUsePolicy()
    for step in range(20_000):
        policy.touch(bytes([step % 4]), float(step))
    assert len(policy._heap) <= 2 * 4 + 65
