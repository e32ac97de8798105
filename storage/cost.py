"""What moving or recomputing a block costs on this machine, and which is cheaper."""

from __future__ import annotations

import enum
import hashlib
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.frame import Frame, Frames, copy_bytes
from batchllm.storage.tier import Outcome


class Decision(enum.Enum):
    """What becomes of a block that has to leave."""

    DROP = "drop"
    HOST = "host"
    DISK = "disk"
    WAIT = "wait"


class Rate(enum.Enum):
    """What a `CostTable` knows; tokens or bytes per second."""

    PREFILL = "prefill_tokens_per_s"
    COPY_OUT = "copy_out_bytes_per_s"  # device to host
    COPY_IN = "copy_in_bytes_per_s"  # host to device
    DISK_WRITE = "disk_write_bytes_per_s"
    DISK_READ = "disk_read_bytes_per_s"


@dataclass(frozen=True, slots=True)
class Victim:
    """A block that has to leave. `recompute_tokens`: what has to be prefilled again if it is dropped, itself included.

    `next_use_s`: seconds from now until it is needed, infinity for never.
    """

    block_bytes: int
    recompute_tokens: int
    next_use_s: float


class CostTable:
    """Measured rates, corrected by each observation: `weight` of the new rate, the rest of the old."""

    def __init__(self, rates: dict[Rate, float], *, weight: float = 0.1, margin: float = 1.25) -> None:
        """`margin`: how many times cheaper than recomputing a tier must be to be used, as both are estimates.

        A rate that is not given is not known: then a tier that needs it is not used, and without a prefill rate a
        tier always pays.
        """
        if not all(rate > 0 for rate in rates.values()):
            raise ValueError(f"rates are above 0: {rates}")
        if not 0 < weight <= 1 or margin < 1:
            raise ValueError(f"weight {weight} is in (0, 1], margin {margin} at least 1")
        self.rates = dict(rates)
        self._weight = weight
        self._margin = margin

    def observe(self, rate: Rate, *, amount: float, seconds: float) -> None:
        """Take in that `amount` tokens or bytes took `seconds`; what was too short to time changes nothing."""
        if amount <= 0 or seconds <= 0:
            return
        new = amount / seconds
        old = self.rates.get(rate, new)
        # In seconds per unit, which is what adds up over a run: one stalled transfer must not hide behind many fast
        # ones.
        self.rates[rate] = 1 / ((1 - self._weight) / old + self._weight / new)

    def recompute_s(self, num_tokens: int) -> float:
        rate = self.rates.get(Rate.PREFILL)
        return num_tokens / rate if rate else float("inf")

    def host_s(self, num_bytes: int) -> float:
        """Seconds to copy a block out and in again."""
        return self._seconds(num_bytes, Rate.COPY_OUT, Rate.COPY_IN)

    def disk_s(self, num_bytes: int) -> float:
        """Seconds to copy out, write, read and copy in again."""
        return self._seconds(num_bytes, Rate.COPY_OUT, Rate.DISK_WRITE, Rate.DISK_READ, Rate.COPY_IN)

    def decide(self, victim: Victim, *, has_host: bool, has_disk: bool) -> Decision:
        """The cheapest of the places there are; DROP where none pays; WAIT where it is needed before it could be
        back.
        """
        if victim.next_use_s == float("inf"):
            return Decision.DROP
        choices: list[tuple[float, Decision]] = []
        if has_host:
            choices.append((self.host_s(victim.block_bytes), Decision.HOST))
        if has_disk:
            choices.append((self.disk_s(victim.block_bytes), Decision.DISK))
        seconds, decision = min(choices, key=lambda choice: choice[0], default=(float("inf"), Decision.DROP))
        if seconds == float("inf") or seconds * self._margin > self.recompute_s(victim.recompute_tokens):
            return Decision.DROP
        return Decision.WAIT if victim.next_use_s < seconds else decision

    def _seconds(self, num_bytes: int, *rates: Rate) -> float:
        return sum(num_bytes / self.rates[rate] if rate in self.rates else float("inf") for rate in rates)


def measure_copy(*, block_bytes: int, seconds: float = 0.2) -> float:
    """Bytes per second of copying blocks between places in memory too far apart to be cached."""
    num_blocks = max(2, min(256, (64 << 20) // block_bytes))
    frames = Frames(num_frames=num_blocks, block_bytes=block_bytes)
    blocks = [frame.payload for frame in iter(frames.take, None) if frame is not None]
    for block in blocks:
        block[:] = bytes(block_bytes)  # touch the pages: a first touch is a page fault, not a copy
    num_copied, began_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_s) < seconds:
        index = num_copied % num_blocks
        copy_bytes(source=blocks[index], target=blocks[(index + num_blocks // 2) % num_blocks])
        num_copied += 1
    return num_copied * block_bytes / elapsed_s


def measure_disk(folder: Path, *, block_bytes: int, seconds: float = 0.4, depth: int = 32) -> tuple[float, float]:
    """(write, read) bytes per second of a disk tier in `folder`, each measured for `seconds`; 0 where it cannot
    write.
    """
    num_slots = max(depth, min(1024, (256 << 20) // block_bytes))
    options = DiskOptions(depth=depth)
    tier = DiskTier(folder, fingerprint=bytes(32), block_bytes=block_bytes, num_slots=num_slots, options=options)
    try:
        frames = Frames(num_frames=depth, block_bytes=block_bytes)
        buffers = [frame for frame in iter(frames.take, None) if frame is not None]
        keys = [
            hashlib.blake2b(index.to_bytes(8, "little"), digest_size=32).digest() for index in range(tier.num_slots)
        ]
        write_rate, num_written = _pump(tier, keys, buffers, seconds=seconds, is_store=True)
        read_rate, _num_read = _pump(tier, keys[:num_written], buffers, seconds=seconds, is_store=False)
        return write_rate, read_rate
    finally:
        tier.close()


def _pump(
    tier: DiskTier, keys: list[bytes], buffers: list[Frame], *, seconds: float, is_store: bool
) -> tuple[float, int]:
    """Keep all buffers in flight until the keys or the time run out; (bytes per second, blocks moved)."""
    waiting, idle = deque(keys), deque(buffers)
    busy: dict[int, Frame] = {}
    num_done = 0
    began_s = time.perf_counter()
    while busy or (waiting and time.perf_counter() - began_s < seconds):
        while idle and waiting and time.perf_counter() - began_s < seconds:
            frame = idle.popleft()
            key = waiting.popleft()
            busy[id(tier.store(key, frame) if is_store else tier.load(key, frame))] = frame
        for transfer in tier.poll(timeout_s=1.0):
            idle.append(busy.pop(id(transfer)))
            num_done += transfer.outcome is Outcome.DONE
    elapsed_s = time.perf_counter() - began_s
    return num_done * tier.block_bytes / elapsed_s, num_done
