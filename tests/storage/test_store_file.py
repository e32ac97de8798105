"""Blocks that outlive a run: found by the next one, safe from others, bounded in room and age."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchllm.storage import store_file
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.errors import StorageError
from batchllm.storage.frame import PAGE_BYTES, frame_stride
from batchllm.storage.tier import MissCause, Outcome

BLOCK_BYTES = 6_000
MODEL = bytes(range(32))

Finish = Callable[..., None]
KeyOf = Callable[[int], bytes]
BlockOf = Callable[..., np.ndarray]


def open_tier(folder: Path, *, fingerprint: bytes = MODEL, num_slots: int = 8, now_s: float = 1_000.0) -> DiskTier:
    return DiskTier(
        folder,
        fingerprint=fingerprint,
        block_bytes=BLOCK_BYTES,
        num_slots=num_slots,
        options=DiskOptions(persist=True, max_age_s=100.0),
        clock=lambda: now_s,
    )


def fill(tier: DiskTier, finish: Finish, key_of: KeyOf, block_of: BlockOf, *, numbers: range) -> None:
    data = {number: block_of(number, BLOCK_BYTES) for number in numbers}
    transfers = [tier.store(key_of(number), memoryview(data[number])) for number in numbers]
    finish(tier, *transfers)
    assert all(transfer.outcome is Outcome.DONE for transfer in transfers)


def found(tier: DiskTier, finish: Finish, key_of: KeyOf, block_of: BlockOf, *, numbers: range) -> list[int]:
    """Which numbers come back; their bytes are checked."""
    back = []
    for number in numbers:
        into = np.zeros(BLOCK_BYTES, np.uint8)
        finish(tier, transfer := tier.load(key_of(number), memoryview(into)))
        if transfer.outcome is Outcome.DONE:
            assert np.array_equal(into, block_of(number, BLOCK_BYTES))
            back.append(number)
    return back


def test_the_next_run_finds_the_blocks_of_the_last_one(
    tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf
) -> None:
    tier = open_tier(tmp_path)
    fill(tier, finish, key_of, block_of, numbers=range(5))
    tier.close()
    tier = open_tier(tmp_path)
    assert len(tier.keys()) == 5 and tier.num_free == 3
    assert found(tier, finish, key_of, block_of, numbers=range(8)) == [0, 1, 2, 3, 4]
    tier.check_integrity()
    tier.close()


OTHER_RUN = """
import sys
from pathlib import Path
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.keys import KeyScope, block_key, root_key
keys = [root_key(KeyScope(model=b"m", layout="l", dtype="d"))]
for start in (0, 4, 8):
    keys.append(block_key(keys[-1], list(range(start, start + 4))))
keys = keys[1:]
tier = DiskTier(Path(sys.argv[1]), fingerprint=bytes(range(32)), block_bytes=6_000, num_slots=8,
                options=DiskOptions(persist=True))
print(sum(map(tier.contains, keys)))
data = [bytes([index]) * 6_000 for index in range(len(keys))]
for key, block in zip(keys, data):
    tier.store(key, memoryview(block))
tier.close()
"""


def test_processes_with_different_hash_seeds_find_each_others_blocks(tmp_path: Path) -> None:
    outputs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", OTHER_RUN, str(tmp_path)]
        outputs.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert outputs == ["0\n", "3\n"]


def test_a_file_that_is_not_kept_has_no_name(tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf) -> None:
    tier = DiskTier(tmp_path, fingerprint=MODEL, block_bytes=BLOCK_BYTES, num_slots=8)
    assert list(tmp_path.iterdir()) == []
    fill(tier, finish, key_of, block_of, numbers=range(8))
    assert found(tier, finish, key_of, block_of, numbers=range(8)) == list(range(8))
    tier.close()


def test_two_runs_at_once_do_not_touch_each_others_blocks(
    tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "_LOCK_PATIENCE_S", 0.0)
    first = open_tier(tmp_path)
    fill(first, finish, key_of, block_of, numbers=range(4))
    second = open_tier(tmp_path)
    assert "held by another process" in second.backend and second.path is None
    assert second.keys() == []
    fill(second, finish, key_of, block_of, numbers=range(4, 12))
    assert found(first, finish, key_of, block_of, numbers=range(12)) == [0, 1, 2, 3]
    assert found(second, finish, key_of, block_of, numbers=range(12)) == list(range(4, 12))
    second.close()
    first.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_another_model_has_its_own_file(tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf) -> None:
    tier = open_tier(tmp_path)
    fill(tier, finish, key_of, block_of, numbers=range(4))
    tier.close()
    other = open_tier(tmp_path, fingerprint=bytes(32))
    assert other.keys() == [] and other.path != tier.path
    other.close()


def test_another_models_file_under_our_name_is_left_alone(
    tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf
) -> None:
    other = open_tier(tmp_path, fingerprint=bytes(32))
    fill(other, finish, key_of, block_of, numbers=range(4))
    other.close()
    assert other.path is not None
    ours = store_file.cache_path(tmp_path, fingerprint=MODEL, block_bytes=BLOCK_BYTES)
    other.path.rename(ours)
    before = ours.read_bytes()
    tier = open_tier(tmp_path)
    assert "another model's blocks" in tier.backend and tier.keys() == []
    fill(tier, finish, key_of, block_of, numbers=range(8))
    tier.close()
    assert ours.read_bytes() == before


def test_another_models_slot_inside_our_file_is_no_block_of_ours(
    tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf
) -> None:
    other = open_tier(tmp_path, fingerprint=bytes(32))
    fill(other, finish, key_of, block_of, numbers=range(1))
    other.close()
    tier = open_tier(tmp_path)
    fill(tier, finish, key_of, block_of, numbers=range(2))
    assert other.path is not None and tier.path is not None
    with open(other.path, "rb") as source, open(tier.path, "r+b") as target:
        source.seek(PAGE_BYTES)
        target.seek(PAGE_BYTES)
        target.write(source.read(frame_stride(BLOCK_BYTES)))
    into = np.zeros(BLOCK_BYTES, np.uint8)
    finish(tier, transfer := tier.load(key_of(0), memoryview(into)))
    assert (transfer.outcome, transfer.cause) == (Outcome.CORRUPT, MissCause.OTHER_MODEL)
    tier.close()
    tier = open_tier(tmp_path)
    assert found(tier, finish, key_of, block_of, numbers=range(2)) == [1]
    tier.close()


def test_blocks_past_their_age_are_free_again(tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf) -> None:
    for now_s, numbers in ((1_000.0, range(3)), (1_060.0, range(3, 5))):
        tier = open_tier(tmp_path, now_s=now_s)
        fill(tier, finish, key_of, block_of, numbers=numbers)
        tier.close()
    tier = open_tier(tmp_path, now_s=1_120.0)
    assert found(tier, finish, key_of, block_of, numbers=range(5)) == [3, 4]
    assert tier.num_free == 6
    tier.close()


def test_a_smaller_cap_cuts_the_file_and_keeps_what_still_fits(
    tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf
) -> None:
    tier = open_tier(tmp_path, num_slots=8)
    fill(tier, finish, key_of, block_of, numbers=range(8))
    tier.close()
    tier = open_tier(tmp_path, num_slots=3)
    assert tier.path is not None
    assert tier.path.stat().st_size == PAGE_BYTES + 3 * frame_stride(BLOCK_BYTES)
    assert found(tier, finish, key_of, block_of, numbers=range(8)) == [0, 1, 2]
    tier.close()


NOISE = np.random.default_rng(0).bytes(100_000)


@pytest.mark.parametrize("content", [b"", b"\x80\x04cposix\nsystem\n", NOISE], ids=["nothing", "a pickle", "noise"])
def test_a_file_that_is_no_cache_is_started_afresh(
    tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf, content: bytes
) -> None:
    store_file.cache_path(tmp_path, fingerprint=MODEL, block_bytes=BLOCK_BYTES).write_bytes(content)
    tier = open_tier(tmp_path)
    assert tier.keys() == []
    fill(tier, finish, key_of, block_of, numbers=range(8))
    tier.close()
    tier = open_tier(tmp_path)
    assert found(tier, finish, key_of, block_of, numbers=range(8)) == list(range(8))
    tier.close()


def test_rubbish_in_every_slot_gives_no_block_and_runs_no_code(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.close()
    assert tier.path is not None
    mark = tmp_path / "touched"
    attack = b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    with open(tier.path, "r+b") as file:
        for slot in range(8):
            file.seek(store_file.slot_offset(slot, stride=frame_stride(BLOCK_BYTES)))
            file.write(attack * 20)
    tier = open_tier(tmp_path)
    assert tier.keys() == [] and tier.num_free == 8
    assert not mark.exists()
    tier.close()


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17])
@pytest.mark.parametrize("value_bytes", [2, 4])
def test_block_sizes_that_are_no_whole_pages_are_padded(
    tmp_path: Path, finish: Finish, block_of: BlockOf, num_tokens: int, value_bytes: int
) -> None:
    block_bytes = num_tokens * 30 * 2 * 3 * 64 * value_bytes
    tier = DiskTier(tmp_path, fingerprint=MODEL, block_bytes=block_bytes, num_slots=2)
    assert tier.stride % PAGE_BYTES == 0 and PAGE_BYTES <= tier.stride - block_bytes < 2 * PAGE_BYTES
    data, into = block_of(1, block_bytes), np.zeros(block_bytes, np.uint8)
    finish(tier, tier.store(b"k" * 32, memoryview(data)))
    finish(tier, tier.load(b"k" * 32, memoryview(into)))
    assert np.array_equal(data, into)
    tier.close()


def test_where_direct_io_is_refused_the_file_is_buffered_and_says_so(
    tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store_file.fcntl.fcntl

    def refuse_direct(file_descriptor: int, command: int, *arguments: int) -> int:
        if command == store_file.fcntl.F_SETFL and arguments[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid")
        return real(file_descriptor, command, *arguments)

    monkeypatch.setattr(store_file.fcntl, "fcntl", refuse_direct)
    tier = open_tier(tmp_path)
    assert "buffered" in tier.backend and "O_DIRECT refused" in tier.backend
    fill(tier, finish, key_of, block_of, numbers=range(8))
    assert found(tier, finish, key_of, block_of, numbers=range(8)) == list(range(8))
    tier.close()


def test_a_file_system_with_little_room_gives_fewer_slots(
    tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstatvfs
    free_bytes = 4 * frame_stride(BLOCK_BYTES)

    def little_room(file_descriptor: int) -> os.statvfs_result:
        values = list(real(file_descriptor))
        values[4] = free_bytes // values[1]
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "fstatvfs", little_room)
    tier = open_tier(tmp_path)
    assert tier.num_slots == 3 and "room for 3 of 8 blocks" in tier.backend
    fill(tier, finish, key_of, block_of, numbers=range(3))
    tier.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_where_room_cannot_be_reserved_writes_find_out_for_themselves(
    tmp_path: Path, finish: Finish, key_of: KeyOf, block_of: BlockOf, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(store_file, "_reserve", lambda _file_descriptor, _length: code)
    tier = open_tier(tmp_path)
    assert "not preallocated" in tier.backend
    fill(tier, finish, key_of, block_of, numbers=range(8))
    tier.close()


LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from batchllm.storage.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), fingerprint=bytes(32), block_bytes=6_000, num_slots=8)
transfer = tier.store(b"k" * 32, memoryview(bytes(6_000)))
while not transfer.done:
    tier.poll(timeout_s=1)
print(tier.num_slots, transfer.outcome.value)
tier.close()
"""


def test_the_room_for_all_slots_is_reserved_at_the_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert tier.path is not None
    if "not preallocated" not in tier.backend:
        assert tier.path.stat().st_blocks * 512 >= PAGE_BYTES + 8 * frame_stride(BLOCK_BYTES)
    tier.close()


def test_a_limit_on_file_sizes_gives_a_tier_without_slots(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert output == "0 full\n"


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/cache"):
        open_tier(tmp_path / "file" / "cache")


def test_a_file_removed_between_open_and_lock_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store_file.cache_path(tmp_path, fingerprint=MODEL, block_bytes=BLOCK_BYTES)
    real, num_calls = store_file._lock, 0

    def remove_first(file_descriptor: int) -> str:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            path.unlink()
        return real(file_descriptor)

    monkeypatch.setattr(store_file, "_lock", remove_first)
    tier = open_tier(tmp_path)
    assert num_calls == 2 and path.exists()
    tier.close()


def test_a_kept_file_leaves_the_same_room_to_spare_each_time_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stride, disk_bytes = frame_stride(BLOCK_BYTES), 100 * frame_stride(BLOCK_BYTES)

    class Space:
        f_frsize = 1

        def __init__(self, file_descriptor: int) -> None:
            self.f_bavail = disk_bytes - os.fstat(file_descriptor).st_blocks * 512

    monkeypatch.setattr(store_file.os, "fstatvfs", Space)
    sizes = []
    for _ in range(3):
        tier = open_tier(tmp_path, num_slots=1_000)
        sizes.append(tier.num_slots)
        tier.close()
    assert sizes == [(disk_bytes * 95 // 100 - PAGE_BYTES) // stride] * 3
