"""One suite for every tier; a dictionary is the tier that the others must agree with."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.frame import Frame, Frames
from batchllm.storage.host import HostTier
from batchllm.storage.ring import check_uring_setup, open_queue
from batchllm.storage.submission import SubmissionQueue
from batchllm.storage.tier import MissCause, Outcome, Tier, TierCounters, Transfer, TransferKind, payload_view

BLOCK_BYTES = 5000


class DictionaryTier:
    """The oracle: a dictionary with a limit."""

    def __init__(self, *, num_slots: int) -> None:
        self.block_bytes = BLOCK_BYTES
        self.num_slots = num_slots
        self.counters = TierCounters()
        self._blocks: dict[bytes, bytes] = {}
        self._finished: list[Transfer] = []

    def contains(self, key: bytes) -> bool:
        return key in self._blocks

    def store(self, key: bytes, data: memoryview | Frame, *, replace: bytes | None = None) -> Transfer:
        transfer = Transfer(TransferKind.STORE, key, self.block_bytes)
        self.counters.begin(transfer)
        if key not in self._blocks:
            if len(self._blocks) >= self.num_slots and replace in self._blocks:
                del self._blocks[replace]
            if len(self._blocks) >= self.num_slots:
                return self._end(transfer, Outcome.FULL)
            self._blocks[key] = bytes(payload_view(data, block_bytes=self.block_bytes))
        return self._end(transfer, Outcome.DONE)

    def load(self, key: bytes, into: memoryview | Frame) -> Transfer:
        transfer = Transfer(TransferKind.LOAD, key, self.block_bytes)
        self.counters.begin(transfer)
        if key not in self._blocks:
            transfer.cause = MissCause.ABSENT
            return self._end(transfer, Outcome.MISS)
        payload_view(into, block_bytes=self.block_bytes)[:] = self._blocks[key]
        return self._end(transfer, Outcome.DONE)

    def poll(self, timeout_s: float = 0.0) -> list[Transfer]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        self._blocks.clear()

    def _end(self, transfer: Transfer, outcome: Outcome) -> Transfer:
        transfer.outcome = outcome
        self.counters.end(transfer)
        self._finished.append(transfer)
        return transfer


def refuse_uring(_file_descriptor: int, _depth: int) -> SubmissionQueue:
    raise OSError(errno.EPERM, "not permitted")


def open_threads(file_descriptor: int, depth: int) -> tuple[SubmissionQueue, str]:
    submissions, _reason = open_queue(file_descriptor, depth, open_uring=refuse_uring)
    return submissions, ""


@contextmanager
def open_tier(name: str, *, num_slots: int) -> Iterator[Tier]:
    """A new tier; its folder goes with it."""
    if name == "dictionary":
        yield DictionaryTier(num_slots=num_slots)
        return
    if name == "host":
        host = HostTier(num_slots=num_slots, block_bytes=BLOCK_BYTES)
        yield host
        host.close()
        return
    parent = "/dev/shm" if name == "disk-memory-file-system" else None
    folder = Path(tempfile.mkdtemp(dir=parent))
    makers = {"disk-io_uring": open_queue, "disk-threads": open_threads, "disk-buffered": open_threads}
    options = DiskOptions(direct=name != "disk-buffered", depth=4)
    disk = DiskTier(
        folder,
        fingerprint=bytes(32),
        block_bytes=BLOCK_BYTES,
        num_slots=num_slots,
        options=options,
        open_submissions=makers.get(name, open_threads),
    )
    try:
        yield disk
        disk.check_integrity()
    finally:
        disk.close()
        shutil.rmtree(folder)


@pytest.fixture(
    params=["dictionary", "host", "disk-io_uring", "disk-threads", "disk-buffered", "disk-memory-file-system"]
)
def tier_name(request: pytest.FixtureRequest) -> str:
    if request.param == "disk-io_uring":
        try:
            check_uring_setup()
        except OSError as error:
            pytest.skip(f"this machine refuses io_uring: {error}")
    if request.param == "disk-memory-file-system" and not Path("/dev/shm").is_dir():
        pytest.skip("needs /dev/shm")
    return str(request.param)


def block(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def key(number: int) -> bytes:
    return bytes([number]) * 32


Finish = Callable[..., None]


def test_a_stored_block_comes_back_byte_for_byte(tier_name: str, finish: Finish) -> None:
    with open_tier(tier_name, num_slots=4) as tier:
        data, into = block(1), np.zeros(BLOCK_BYTES, np.uint8)
        finish(tier, stored := tier.store(key(1), memoryview(data)))
        finish(tier, loaded := tier.load(key(1), memoryview(into)))
        assert (stored.outcome, loaded.outcome) == (Outcome.DONE, Outcome.DONE)
        assert np.array_equal(into, data)


def test_a_block_goes_through_frames_byte_for_byte(tier_name: str, finish: Finish) -> None:
    frames = Frames(num_frames=2, block_bytes=BLOCK_BYTES)
    source, target = frames.take(), frames.take()
    assert source is not None and target is not None
    with open_tier(tier_name, num_slots=4) as tier:
        source.payload[:] = block(2).tobytes()
        finish(tier, tier.store(key(2), source))
        finish(tier, tier.load(key(2), target))
        assert target.payload == source.payload


def test_a_key_that_was_never_stored_is_a_miss(tier_name: str, finish: Finish) -> None:
    with open_tier(tier_name, num_slots=4) as tier:
        finish(tier, loaded := tier.load(key(9), memoryview(np.zeros(BLOCK_BYTES, np.uint8))))
        assert (loaded.outcome, loaded.cause) == (Outcome.MISS, MissCause.ABSENT)


def test_a_block_is_found_only_after_its_store_was_polled_or_ended(tier_name: str, finish: Finish) -> None:
    with open_tier(tier_name, num_slots=4) as tier:
        stored = tier.store(key(1), memoryview(block(1)))
        assert tier.contains(key(1)) == stored.done
        finish(tier, stored)
        assert tier.contains(key(1))


def test_a_tier_without_slots_takes_nothing_and_finds_nothing(tier_name: str, finish: Finish) -> None:
    with open_tier(tier_name, num_slots=0) as tier:
        finish(tier, stored := tier.store(key(1), memoryview(block(1))))
        finish(tier, loaded := tier.load(key(1), memoryview(np.zeros(BLOCK_BYTES, np.uint8))))
        assert (stored.outcome, loaded.outcome) == (Outcome.FULL, Outcome.MISS)


def test_a_tier_of_one_slot_holds_the_block_named_last(tier_name: str, finish: Finish) -> None:
    with open_tier(tier_name, num_slots=1) as tier:
        finish(tier, tier.store(key(1), memoryview(block(1))))
        finish(tier, refused := tier.store(key(2), memoryview(block(2))))
        finish(tier, taken := tier.store(key(3), memoryview(block(3)), replace=key(1)))
        assert (refused.outcome, taken.outcome) == (Outcome.FULL, Outcome.DONE)
        assert [tier.contains(key(number)) for number in (1, 2, 3)] == [False, False, True]


def test_making_room_for_one_block_gives_up_exactly_one(tier_name: str, finish: Finish) -> None:
    with open_tier(tier_name, num_slots=6) as tier:
        for number in range(6):
            finish(tier, tier.store(key(number), memoryview(block(number))))
        finish(tier, tier.store(key(9), memoryview(block(9)), replace=key(3)))
        assert [number for number in range(10) if tier.contains(key(number))] == [0, 1, 2, 4, 5, 9]


def test_a_victim_is_kept_while_there_is_a_free_slot(tier_name: str, finish: Finish) -> None:
    with open_tier(tier_name, num_slots=2) as tier:
        finish(tier, tier.store(key(1), memoryview(block(1))))
        finish(tier, tier.store(key(2), memoryview(block(2)), replace=key(1)))
        assert tier.contains(key(1)) and tier.contains(key(2))


def test_every_transfer_is_returned_by_exactly_one_poll(tier_name: str) -> None:
    with open_tier(tier_name, num_slots=3) as tier:
        into = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(2)]
        data = [block(number) for number in range(5)]
        begun = [tier.store(key(number), memoryview(data[number])) for number in range(5)]
        begun += [tier.load(key(number), memoryview(buffer)) for number, buffer in zip((0, 9), into, strict=True)]
        polled: list[Transfer] = []
        while len(polled) < len(begun):
            polled += tier.poll(timeout_s=5.0)
        assert sorted(map(id, polled)) == sorted(map(id, begun))
        assert tier.poll() == []
        assert tier.counters.num_in_flight == 0


def test_a_buffer_of_the_wrong_size_is_refused(tier_name: str) -> None:
    if tier_name == "dictionary":
        pytest.skip("the oracle checks no sizes before it stores")
    with open_tier(tier_name, num_slots=3) as tier:
        with pytest.raises(ValueError, match="5000 bytes"):
            tier.store(key(1), memoryview(bytes(4999)))
        with pytest.raises(ValueError, match="5000 bytes"):
            tier.load(key(1), memoryview(bytearray(5001)))


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "load", "poll"]), st.integers(0, 6), st.integers(0, 6)), max_size=40
)


@settings(max_examples=50, deadline=None)
@given(steps=STEPS, num_slots=st.integers(0, 4))
def check_agreement(name: str, finish: Finish, steps: list[tuple[str, int, int]], num_slots: int) -> None:
    oracle = DictionaryTier(num_slots=num_slots)
    with open_tier(name, num_slots=num_slots) as tier:
        for action, number, victim in steps:
            if action == "store":
                expected = oracle.store(key(number), memoryview(block(number)), replace=key(victim))
                finish(tier, actual := tier.store(key(number), memoryview(block(number)), replace=key(victim)))
                assert actual.outcome is expected.outcome
            elif action == "load":
                into = np.zeros(BLOCK_BYTES, np.uint8)
                expected = oracle.load(key(number), memoryview(np.zeros(BLOCK_BYTES, np.uint8)))
                finish(tier, actual := tier.load(key(number), memoryview(into)))
                assert (actual.outcome, actual.cause) == (expected.outcome, expected.cause)
                assert actual.outcome is not Outcome.DONE or np.array_equal(into, block(number))
            assert all(tier.contains(key(other)) == oracle.contains(key(other)) for other in range(7))


def test_operations_one_by_one_agree_with_the_dictionary(tier_name: str, finish: Finish) -> None:
    check_agreement(tier_name, finish)


@settings(max_examples=50, deadline=None)
@given(steps=STEPS, num_slots=st.integers(0, 4))
def check_overlap(name: str, steps: list[tuple[str, int, int]], num_slots: int) -> None:
    with open_tier(name, num_slots=num_slots) as tier:
        stores: list[tuple[Transfer, np.ndarray]] = []
        loads: list[tuple[Transfer, int, np.ndarray]] = []
        for action, number, victim in steps:
            if action == "store":
                data = block(number)
                stores.append((tier.store(key(number), memoryview(data), replace=key(victim)), data))
            elif action == "load":
                into = np.zeros(BLOCK_BYTES, np.uint8)
                was_there = tier.contains(key(number))
                loads.append((tier.load(key(number), memoryview(into)), number, into))
                assert was_there or loads[-1][0].outcome is Outcome.MISS
            else:
                tier.poll()
        while tier.counters.num_in_flight:
            tier.poll(timeout_s=5.0)
        for loaded, number, into in loads:
            assert loaded.outcome in (Outcome.DONE, Outcome.MISS)
            assert loaded.outcome is not Outcome.DONE or np.array_equal(into, block(number))
        assert all(stored.outcome in (Outcome.DONE, Outcome.FULL) for stored, _data in stores)
        assert sum(tier.contains(key(number)) for number in range(7)) <= num_slots


def test_overlapping_operations_never_give_another_blocks_bytes(tier_name: str) -> None:
    check_overlap(tier_name)
