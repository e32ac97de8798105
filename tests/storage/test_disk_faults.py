"""Each fault of a device has one defined end: the right bytes, a miss, or a store that did not happen."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.frame import PAGE_BYTES
from batchllm.storage.ring import open_queue
from batchllm.storage.store_file import slot_offset
from batchllm.storage.submission import Completion, Operation, SubmissionQueue
from batchllm.storage.tier import MissCause, Outcome, Transfer

BLOCK_BYTES = 20_000
FINGERPRINT = bytes(range(32))

Finish = Callable[..., None]
KeyOf = Callable[[int], bytes]
BlockOf = Callable[..., np.ndarray]


@dataclass
class Faults:
    """What a `FaultyQueue` does. Each list is used up from its end; `always` stays.

    `refuse`: errno raised by submit. `fail`: errno as the completion's result. `shorten`: bytes that are really moved.
    `delay_s`: completions are held up to so long and returned in random order.
    """

    refuse: list[int] = field(default_factory=list)
    fail_reads: list[int] = field(default_factory=list)
    fail_writes: list[int] = field(default_factory=list)
    shorten: list[int] = field(default_factory=list)
    always_fail_writes: int = 0
    delay_s: float = 0.0
    crash: bool = False


class FaultyQueue:
    """A real queue with faults in front of it."""

    name = "faulty"

    def __init__(self, inner: SubmissionQueue, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._made_up: list[Completion] = []
        self._random = random.Random(0)

    def submit(self, operation: Operation) -> None:
        faults = self._faults
        if faults.crash:
            raise TypeError("a bug on the thread")
        if faults.refuse:
            code = faults.refuse.pop()
            raise OSError(code, os.strerror(code))
        planned = faults.fail_writes if operation.is_write else faults.fail_reads
        code = planned.pop() if planned else faults.always_fail_writes if operation.is_write else 0
        if code:
            self._made_up.append(Completion(operation.tag, -code))
            self._inner.wake()
            return
        if faults.shorten:
            operation = operation._replace(view=operation.view[: faults.shorten.pop()])
        self._inner.submit(operation)

    def begin(self) -> None:
        self._inner.begin()

    def wait(self) -> list[Completion]:
        completions = self._inner.wait() + self._made_up
        self._made_up = []
        if self._faults.delay_s and completions:
            time.sleep(self._random.uniform(0, self._faults.delay_s))
            self._random.shuffle(completions)
            held = len(completions) // 2
            self._made_up = completions[:held]
            completions = completions[held:]
            if held:
                self._inner.wake()
        return completions

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def tier(tmp_path: Path, faults: Faults) -> Iterator[DiskTier]:
    made = open_tier(tmp_path, faults)
    yield made
    made.check_integrity()
    made.close()


def open_tier(folder: Path, faults: Faults, *, num_slots: int = 8, persist: bool = True) -> DiskTier:
    def open_faulty(file_descriptor: int, depth: int) -> tuple[SubmissionQueue, str]:
        inner, note = open_queue(file_descriptor, depth)
        return FaultyQueue(inner, faults), note

    return DiskTier(
        folder,
        fingerprint=FINGERPRINT,
        block_bytes=BLOCK_BYTES,
        num_slots=num_slots,
        options=DiskOptions(persist=persist, retry_after_s=0.05, max_retry_after_s=0.2, depth=8),
        open_submissions=open_faulty,
    )


def store(tier: DiskTier, finish: Finish, key: bytes, data: np.ndarray) -> Transfer:
    transfer = tier.store(key, memoryview(data))
    finish(tier, transfer)
    return transfer


def load(tier: DiskTier, finish: Finish, key: bytes) -> tuple[Transfer, np.ndarray]:
    into = np.zeros(BLOCK_BYTES, np.uint8)
    transfer = tier.load(key, memoryview(into))
    finish(tier, transfer)
    return transfer, into


def check_round_trip(tier: DiskTier, finish: Finish, key: bytes, data: np.ndarray) -> None:
    assert store(tier, finish, key, data).outcome is Outcome.DONE
    transfer, into = load(tier, finish, key)
    assert transfer.outcome is Outcome.DONE
    assert np.array_equal(into, data)


@pytest.mark.parametrize("sizes", [[4096], [8192, 4096], [5000], [100, 4097, 1], [20480]])
def test_short_writes_and_reads_go_on_where_they_stopped(
    tier: DiskTier, faults: Faults, finish: Finish, key_of: KeyOf, block_of: BlockOf, sizes: list[int]
) -> None:
    # Odd lengths cannot be moved directly: the kernel refuses them with EINVAL, which is another test's matter.
    if any(size % PAGE_BYTES for size in sizes) and "O_DIRECT" in tier.backend:
        sizes = [-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes]
    data = block_of(1, BLOCK_BYTES)
    faults.shorten = list(sizes)
    assert store(tier, finish, key_of(1), data).outcome is Outcome.DONE
    faults.shorten = list(sizes)
    transfer, into = load(tier, finish, key_of(1))
    assert transfer.outcome is Outcome.DONE and np.array_equal(into, data)
    assert faults.shorten == []


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.EBUSY])
def test_a_storm_of_interruptions_is_sat_out(
    tier: DiskTier, faults: Faults, finish: Finish, key_of: KeyOf, block_of: BlockOf, code: int
) -> None:
    faults.refuse = [code] * 20
    faults.fail_writes = [code] * 20
    faults.fail_reads = [code] * 20
    check_round_trip(tier, finish, key_of(1), block_of(1, BLOCK_BYTES))
    assert faults.refuse == faults.fail_writes == faults.fail_reads == []


def test_an_interruption_that_never_ends_becomes_a_failure(
    tier: DiskTier, faults: Faults, finish: Finish, key_of: KeyOf, block_of: BlockOf
) -> None:
    faults.always_fail_writes = errno.EAGAIN
    transfer = store(tier, finish, key_of(1), block_of(1, BLOCK_BYTES))
    assert (transfer.outcome, transfer.errno) == (Outcome.FAILED, errno.EAGAIN)
    assert not tier.contains(key_of(1))


def test_a_read_error_is_a_miss_and_frees_the_slot(
    tier: DiskTier, faults: Faults, finish: Finish, key_of: KeyOf, block_of: BlockOf
) -> None:
    store(tier, finish, key_of(1), block_of(1, BLOCK_BYTES))
    faults.fail_reads = [errno.EIO]
    transfer, _into = load(tier, finish, key_of(1))
    assert (transfer.outcome, transfer.cause, transfer.errno) == (Outcome.FAILED, MissCause.IO_ERROR, errno.EIO)
    assert not tier.contains(key_of(1)) and tier.num_free == tier.num_slots
    check_round_trip(tier, finish, key_of(1), block_of(1, BLOCK_BYTES))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_a_write_error_at_any_write_leaves_nothing_and_is_retried_later(
    tier: DiskTier,
    faults: Faults,
    finish: Finish,
    key_of: KeyOf,
    block_of: BlockOf,
    caplog: pytest.LogCaptureFixture,
    code: int,
    num_good: int,
) -> None:
    caplog.set_level(logging.WARNING)
    for number in range(num_good):
        check_round_trip(tier, finish, key_of(number), block_of(number, BLOCK_BYTES))
    faults.always_fail_writes = code
    failed = store(tier, finish, key_of(50), block_of(50, BLOCK_BYTES))
    refused = store(tier, finish, key_of(51), block_of(51, BLOCK_BYTES))
    assert (failed.outcome, failed.errno) == (refused.outcome, refused.errno) == (Outcome.FAILED, code)
    assert not tier.contains(key_of(50)) and tier.num_free == tier.num_slots - num_good
    for number in range(num_good):
        transfer, into = load(tier, finish, key_of(number))
        assert transfer.outcome is Outcome.DONE and np.array_equal(into, block_of(number, BLOCK_BYTES))
    time.sleep(0.06)
    assert store(tier, finish, key_of(52), block_of(52, BLOCK_BYTES)).outcome is Outcome.FAILED
    assert sum("writing failed" in record.message for record in caplog.records) == 1, "warned once"
    faults.always_fail_writes = 0
    time.sleep(0.11)
    check_round_trip(tier, finish, key_of(53), block_of(53, BLOCK_BYTES))


def test_completions_that_come_late_and_out_of_order_still_fit_their_blocks(
    tmp_path: Path, faults: Faults, key_of: KeyOf, block_of: BlockOf
) -> None:
    faults.delay_s = 0.01
    tier = open_tier(tmp_path, faults, num_slots=6, persist=False)
    choose = random.Random(1)
    loads: list[tuple[Transfer, int, np.ndarray]] = []
    buffers: dict[int, tuple[Transfer, np.ndarray]] = {}
    for step in range(300):
        number = choose.randrange(20)
        if step % 2:
            data = block_of(number, BLOCK_BYTES)
            transfer = tier.store(key_of(number), memoryview(data), replace=key_of(choose.randrange(20)))
            buffers[id(transfer)] = (transfer, data)
        else:
            into = np.zeros(BLOCK_BYTES, np.uint8)
            loads.append((tier.load(key_of(number), memoryview(into)), number, into))
        for ended in tier.poll(timeout_s=0.002):
            if id(ended) in buffers:
                buffers.pop(id(ended))[1][:] = 0xEE  # ours again: whoever still reads it stores rubbish
    while tier.counters.num_in_flight:
        tier.poll(timeout_s=5)
    hits = [(number, into) for transfer, number, into in loads if transfer.outcome is Outcome.DONE]
    assert len(hits) > 10
    assert all(np.array_equal(into, block_of(number, BLOCK_BYTES)) for number, into in hits)
    assert tier.counters.misses.keys() <= {MissCause.ABSENT}
    tier.check_integrity()
    tier.close()


def test_a_slot_is_not_written_before_its_readers_have_ended(
    tmp_path: Path, faults: Faults, key_of: KeyOf, block_of: BlockOf
) -> None:
    faults.delay_s = 0.02
    tier = open_tier(tmp_path, faults, num_slots=1, persist=False)
    first, second = block_of(1, BLOCK_BYTES), block_of(2, BLOCK_BYTES)
    tier.store(key_of(1), memoryview(first))
    while not tier.contains(key_of(1)):
        tier.poll(timeout_s=1)
    buffers = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(5)]
    loads = [tier.load(key_of(1), memoryview(into)) for into in buffers]
    tier.store(key_of(2), memoryview(second), replace=key_of(1))
    while tier.counters.num_in_flight:
        tier.poll(timeout_s=1)
    assert [transfer.outcome for transfer in loads] == [Outcome.DONE] * 5
    assert all(np.array_equal(into, first) for into in buffers)
    assert tier.contains(key_of(2)) and not tier.contains(key_of(1))
    tier.close()


def overwrite(tier: DiskTier, *, offset: int, data: bytes) -> None:
    assert tier.path is not None
    with open(tier.path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("offset", "cause"),
    [
        (0, MissCause.HEADER),
        (12, MissCause.HEADER),
        (45, MissCause.HEADER),
        (75, MissCause.HEADER),
        (100, MissCause.HEADER),
        (PAGE_BYTES, MissCause.CHECKSUM),
        (PAGE_BYTES + BLOCK_BYTES - 1, MissCause.CHECKSUM),
    ],
)
def test_a_flipped_byte_anywhere_is_a_miss(
    tier: DiskTier, finish: Finish, key_of: KeyOf, block_of: BlockOf, offset: int, cause: MissCause
) -> None:
    data = block_of(1, BLOCK_BYTES)
    store(tier, finish, key_of(1), data)
    place = slot_offset(0, stride=tier.stride) + offset
    assert tier.path is not None
    with open(tier.path, "rb") as file:
        file.seek(place)
        byte = file.read(1)[0]
    overwrite(tier, offset=place, data=bytes([byte ^ 0x40]))
    transfer, _into = load(tier, finish, key_of(1))
    assert (transfer.outcome, transfer.cause) == (Outcome.CORRUPT, cause)
    assert not tier.contains(key_of(1))
    check_round_trip(tier, finish, key_of(1), data)


def test_a_slot_that_holds_another_block_is_a_miss(
    tier: DiskTier, finish: Finish, key_of: KeyOf, block_of: BlockOf
) -> None:
    for number in (0, 1):
        store(tier, finish, key_of(number), block_of(number, BLOCK_BYTES))
    assert tier.path is not None
    with open(tier.path, "rb") as file:
        file.seek(slot_offset(1, stride=tier.stride))
        other = file.read(tier.stride)
    overwrite(tier, offset=slot_offset(0, stride=tier.stride), data=other)
    transfer, _into = load(tier, finish, key_of(0))
    assert (transfer.outcome, transfer.cause) == (Outcome.CORRUPT, MissCause.OTHER_KEY)


def test_a_file_cut_short_gives_misses_and_takes_new_blocks(
    tier: DiskTier, finish: Finish, key_of: KeyOf, block_of: BlockOf
) -> None:
    for number in range(4):
        store(tier, finish, key_of(number), block_of(number, BLOCK_BYTES))
    assert tier.path is not None
    os.truncate(tier.path, slot_offset(2, stride=tier.stride) + 4096 + 100)
    outcomes = [load(tier, finish, key_of(number))[0] for number in range(4)]
    assert [outcome.outcome for outcome in outcomes[:2]] == [Outcome.DONE] * 2
    assert [outcome.cause for outcome in outcomes[2:]] == [MissCause.TRUNCATED] * 2
    check_round_trip(tier, finish, key_of(3), block_of(3, BLOCK_BYTES))


def test_a_file_deleted_while_open_goes_on_working(
    tier: DiskTier, finish: Finish, key_of: KeyOf, block_of: BlockOf
) -> None:
    store(tier, finish, key_of(1), block_of(1, BLOCK_BYTES))
    assert tier.path is not None
    tier.path.unlink()
    transfer, into = load(tier, finish, key_of(1))
    assert transfer.outcome is Outcome.DONE and np.array_equal(into, block_of(1, BLOCK_BYTES))
    check_round_trip(tier, finish, key_of(2), block_of(2, BLOCK_BYTES))


def test_a_bug_on_the_io_thread_is_reported_through_poll_and_turns_the_tier_off(
    tmp_path: Path, key_of: KeyOf, block_of: BlockOf, finish: Finish, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    tier = open_tier(tmp_path, faults, persist=False)
    store(tier, finish, key_of(1), block_of(1, BLOCK_BYTES))
    faults.crash = True
    data = [block_of(number, BLOCK_BYTES) for number in range(3)]
    begun = [tier.store(key_of(10 + number), memoryview(data[number])) for number in range(3)]
    finish(tier, *begun)
    assert [transfer.outcome for transfer in begun] == [Outcome.FAILED] * 3
    assert any("thread failed" in record.message for record in caplog.records)
    transfer, _into = load(tier, finish, key_of(1))
    assert transfer.outcome is Outcome.FAILED
    tier.check_integrity()
    tier.close()


def test_a_queue_that_cannot_be_opened_turns_the_tier_off_and_says_so(
    tmp_path: Path, key_of: KeyOf, block_of: BlockOf, finish: Finish
) -> None:
    def fail(_file_descriptor: int, _depth: int) -> tuple[SubmissionQueue, str]:
        raise RuntimeError("can't start new thread")

    tier = DiskTier(tmp_path, fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES, num_slots=4, open_submissions=fail)
    assert "off: can't start new thread" in tier.backend
    data = block_of(1, BLOCK_BYTES)
    assert store(tier, finish, key_of(1), data).outcome is Outcome.FAILED
    assert load(tier, finish, key_of(1))[0].outcome is Outcome.MISS
    tier.check_integrity()
    tier.close()


def test_closing_ends_what_is_in_flight_and_leaves_no_thread_or_descriptor(
    tmp_path: Path, faults: Faults, key_of: KeyOf, block_of: BlockOf
) -> None:
    num_descriptors = len(os.listdir("/proc/self/fd"))
    faults.delay_s = 0.005
    tier = open_tier(tmp_path, faults, num_slots=40, persist=False)
    data = [block_of(number, BLOCK_BYTES) for number in range(40)]
    begun = [tier.store(key_of(number), memoryview(data[number])) for number in range(40)]
    tier.close()
    assert {id(transfer) for transfer in tier.poll()} == {id(transfer) for transfer in begun}
    assert all(transfer.outcome is Outcome.DONE for transfer in begun)
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_signals_during_io_change_nothing(tier: DiskTier, finish: Finish, key_of: KeyOf, block_of: BlockOf) -> None:
    num_signals = 0

    def count(_number: int, _frame: object) -> None:
        nonlocal num_signals
        num_signals += 1

    previous = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for step in range(200):
            number = step % 8
            check_round_trip(tier, finish, key_of(number), block_of(number, BLOCK_BYTES))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_signals > 5


WRITER = """
import sys, random
from pathlib import Path
import numpy as np
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.keys import block_key
tier = DiskTier(Path(sys.argv[1]), fingerprint=bytes(range(32)), block_bytes=20_000, num_slots=30,
                options=DiskOptions(persist=True))
print("ready", flush=True)
choose, pinned = random.Random(sys.argv[2]), {}
while True:
    number = choose.randrange(200)
    data = np.random.default_rng(number).integers(0, 256, 20_000, dtype=np.uint8)
    victim = choose.choice(tier.keys() or [None])
    transfer = tier.store(block_key(bytes(32), [number]), memoryview(data), replace=victim)
    pinned[id(transfer)] = (transfer, data)
    for ended in tier.poll(timeout_s=0.001 if len(pinned) > 20 else 0):
        pinned.pop(id(ended))
"""


def test_a_file_whose_writer_was_killed_gives_right_blocks_or_misses(
    tmp_path: Path, finish: Finish, block_of: BlockOf
) -> None:
    from batchllm.storage.keys import block_key

    numbers = {block_key(bytes(32), [number]): number for number in range(200)} | {b"n" * 32: 999}
    num_hits = 0
    for attempt in range(4):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(attempt)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(0.05 + 0.05 * attempt)
            writer.kill()
        tier = open_tier(tmp_path, Faults(), num_slots=30)
        assert tier.path is not None, "the lock died with its process"
        for key in tier.keys():
            transfer, into = load(tier, finish, key)
            if transfer.outcome is Outcome.DONE:
                num_hits += 1
                assert np.array_equal(into, block_of(numbers[key], BLOCK_BYTES))
            else:
                assert transfer.outcome is Outcome.CORRUPT
        check_round_trip_replacing(tier, finish, block_of)
        tier.check_integrity()
        tier.close()
    assert num_hits > 20


def check_round_trip_replacing(tier: DiskTier, finish: Finish, block_of: BlockOf) -> None:
    data = block_of(999, BLOCK_BYTES)
    finish(tier, tier.store(b"n" * 32, memoryview(data), replace=next(iter(tier.keys()), None)))
    transfer, into = load(tier, finish, b"n" * 32)
    assert transfer.outcome is Outcome.DONE and np.array_equal(into, data)


FORGETFUL = """
import sys
from pathlib import Path
from batchllm.storage.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), fingerprint=bytes(32), block_bytes=1_000_000, num_slots=50)
data = [bytes(1_000_000) for _ in range(50)]
for number, block in enumerate(data):
    tier.store(number.to_bytes(32, "little"), memoryview(block))
"""


def test_a_process_that_forgets_to_close_its_tier_still_ends(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
