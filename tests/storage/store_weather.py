"""Tiered stores over a disk in bad weather, and the few calls on them that their tests share."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from disk_weather import Weather, open_in

from batchllm.storage.cost import Decision
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.host import HostTier
from batchllm.storage.policy import NextUsePolicy, Policy
from batchllm.storage.store import TieredStore
from batchllm.storage.tier import Outcome, Transfer

BLOCK_BYTES = 5000

Finish = Callable[..., None]


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


BLOCKS = [np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8) for number in range(64)]


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
            open_submissions=open_in(weather or Weather()),
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
