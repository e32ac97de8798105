"""Tiers without bytes decide as tiers with bytes do."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchllm.storage.disk import DiskTier
from batchllm.storage.host import HostTier
from batchllm.storage.ledger import LedgerDisk, ledger_host
from batchllm.storage.policy import NEVER, LruPolicy, NextUsePolicy, Policy
from batchllm.storage.store import TieredStore
from batchllm.storage.tier import Outcome


def test_a_full_disk_takes_a_block_only_over_a_victim() -> None:
    disk, byte = LedgerDisk(1), memoryview(bytearray(1))
    assert disk.store(b"a", byte).outcome is Outcome.DONE
    assert disk.store(b"b", byte).outcome is Outcome.FULL
    assert disk.store(b"b", byte, replace=b"a").outcome is Outcome.DONE
    assert (disk.keys(), disk.num_free) == ([b"b"], 0)
    assert disk.load(b"a", byte).outcome is Outcome.MISS
    assert [transfer.key for transfer in disk.poll()] == [b"a", b"b", b"b", b"a"]
    assert disk.counters.num_in_flight == 0 and disk.counters.bytes_in == 2


def test_frames_without_room_still_count() -> None:
    host = ledger_host(num_slots=2, num_spare=1)
    frames = [host.reserve(), host.reserve()]
    assert None not in frames and frames[0] is not frames[1]
    assert host.reserve() is None and host.num_free_frames == 1


@pytest.mark.parametrize("make_policy", [NextUsePolicy, LruPolicy])
def test_a_store_over_ledgers_moves_what_a_store_over_real_tiers_moves(
    tmp_path: Path, make_policy: Callable[[], Policy]
) -> None:
    size = 1000
    disk = DiskTier(tmp_path, fingerprint=bytes(32), block_bytes=size, num_slots=6)
    host = HostTier(num_slots=4, block_bytes=size, num_spare=8)
    real = TieredStore(host=host, disk=disk, make_policy=make_policy)
    book = TieredStore(host=ledger_host(num_slots=4, num_spare=8), disk=LedgerDisk(6), make_policy=make_policy)
    choices = random.Random(1)
    for _ in range(400):
        key = bytes([choices.randrange(20)]) * 32
        what, use = choices.choice(["put", "get", "touch", "drop"]), choices.choice([*range(30), NEVER])
        for store, num_bytes in ((real, size), (book, 1)):
            buffer = memoryview(np.zeros(num_bytes, np.uint8))
            if what == "put":
                store.put(key, buffer, next_use=use)
            elif what == "get":
                store.get(key, buffer)
            elif what == "touch":
                store.set_next_use(key, use)
            else:
                store.drop(key)
            while store.num_in_flight:
                store.poll(timeout_s=1.0)
            store.poll()
    assert book.counters == real.counters
    assert real.host is not None and book.host is not None and real.disk is not None and book.disk is not None
    assert book.counters.num_disk_hits > 10 and book.counters.num_spills > 10
    assert book.host.counters.bytes_in * size == real.host.counters.bytes_in
    assert book.disk.counters.bytes_out * size == real.disk.counters.bytes_out
    assert sorted(book.disk.keys()) == sorted(real.disk.keys())
    real.close()
    book.close()
