from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchllm.storage.cache import list_caches, remove_cache, verify_cache
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.errors import CacheInUseError, StorageError
from batchllm.storage.frame import PAGE_BYTES
from batchllm.storage.store_file import slot_offset
from batchllm.storage.tier import MissCause

MODEL = bytes(range(32))

Finish = Callable[..., None]
KeyOf = Callable[[int], bytes]
BlockOf = Callable[..., np.ndarray]
Fill = Callable[..., DiskTier]


@pytest.fixture
def fill(tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf) -> Fill:
    """An open kept tier of eight slots with five blocks, the first written at second 1000."""

    def make(fingerprint: bytes = MODEL) -> DiskTier:
        seconds = iter(range(1000, 2000))
        tier = DiskTier(
            tmp_path,
            fingerprint=fingerprint,
            block_bytes=5000,
            num_slots=8,
            options=DiskOptions(persist=True),
            clock=lambda: float(next(seconds)),
        )
        for number in range(5):
            data = block_of(number)
            finish(tier, tier.store(key_of(number), memoryview(data)))
        return tier

    return make


def test_a_list_names_each_file_with_its_blocks_and_their_ages(tmp_path: Path, fill: Fill) -> None:
    tiers = [fill(), fill(bytes(32))]
    for tier in tiers:
        tier.close()
    caches = {cache.superblock.fingerprint: cache for cache in list_caches(tmp_path) if cache.superblock is not None}
    assert set(caches) == {MODEL, bytes(32)}
    cache = caches[MODEL]
    assert (cache.num_slots, cache.num_blocks, cache.is_in_use) == (8, 5, False)
    assert cache.oldest_s is not None and cache.newest_s is not None and cache.newest_s - cache.oldest_s == 4.0
    assert cache.size_bytes == cache.path.stat().st_size


def test_a_folder_without_caches_or_no_folder_lists_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert list_caches(tmp_path) == list_caches(tmp_path / "missing") == []


def test_a_file_in_use_is_listed_as_such_and_neither_removed_nor_verified(tmp_path: Path, fill: Fill) -> None:
    tier = fill()
    assert tier.path is not None
    assert [cache.is_in_use for cache in list_caches(tmp_path)] == [True]
    with pytest.raises(CacheInUseError, match="in use"):
        remove_cache(tier.path)
    with pytest.raises(CacheInUseError, match="in use"):
        verify_cache(tier.path)
    assert tier.path.exists()
    tier.close()


def test_removing_says_whether_there_was_a_file(fill: Fill) -> None:
    tier = fill()
    tier.close()
    assert tier.path is not None
    assert [remove_cache(tier.path), remove_cache(tier.path)] == [True, False]
    assert not tier.path.exists()


def test_verify_counts_good_free_and_damaged_slots(fill: Fill) -> None:
    tier = fill()
    tier.close()
    assert tier.path is not None
    check = verify_cache(tier.path)
    assert (check.num_good, check.num_free, check.damaged) == (5, 3, {})
    with open(tier.path, "r+b") as file:
        file.seek(slot_offset(0, stride=tier.stride) + PAGE_BYTES + 77)
        file.write(b"\0\1\2\3")
        file.seek(slot_offset(1, stride=tier.stride) + 9)
        file.write(b"\0\1\2\3")
        file.truncate(slot_offset(7, stride=tier.stride) + 100)
    check = verify_cache(tier.path)
    assert (check.num_good, check.num_free) == (3, 2)
    assert check.damaged == {MissCause.CHECKSUM: 1, MissCause.HEADER: 1, MissCause.TRUNCATED: 1}


def test_a_file_with_a_damaged_first_page_is_listed_and_refused_by_verify(tmp_path: Path, fill: Fill) -> None:
    tier = fill()
    tier.close()
    assert tier.path is not None
    with open(tier.path, "r+b") as file:
        file.write(b"rubbish!")
    assert [cache.superblock for cache in list_caches(tmp_path)] == [None]
    with pytest.raises(StorageError, match="first page is damaged"):
        verify_cache(tier.path)
