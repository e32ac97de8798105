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


_NUM_OBSERVED = 9


class CostTable:
    """Measured rates. One that is observed is the middle one of its latest observations and what was measured before."""

    def __init__(self, rates: dict[Rate, float], *, block_s: float = 0.0, margin: float = 1.25) -> None:
        """`block_s`: seconds that a block's way out and back takes beside the moving of its bytes.

        `margin`: how many times cheaper than recomputing a tier must be to be used, as both are estimates.

        A rate that is not given is not known: then a tier that needs it is not used, and without a prefill rate a
        tier always pays.
        """
        if not all(rate > 0 for rate in rates.values()):
            raise ValueError(f"rates are above 0: {rates}")
        if margin < 1 or block_s < 0:
            raise ValueError(f"margin {margin} is at least 1, block_s {block_s} at least 0")
        self.rates = dict(rates)
        self.block_s = block_s
        self._observed = {rate: deque([value], maxlen=_NUM_OBSERVED) for rate, value in rates.items()}
        self._margin = margin

    def observe(self, rate: Rate, *, amount: float, seconds: float) -> None:
        """Take in that `amount` tokens or bytes took `seconds`; of an even number of observations the faster one counts.

        What was too short to time changes nothing.
        """
        if amount <= 0 or seconds <= 0:
            return
        observed = self._observed.setdefault(rate, deque(maxlen=_NUM_OBSERVED))
        observed.append(amount / seconds)
        # A run's first steps are slow, and now and then any one is.
        self.rates[rate] = sorted(observed)[len(observed) // 2]

    def recompute_s(self, num_tokens: int) -> float:
        rate = self.rates.get(Rate.PREFILL)
        return num_tokens / rate if rate else float("inf")

    def host_s(self, num_bytes: int) -> float:
        """Seconds to copy a block out and in again."""
        return self.block_s + self._seconds(num_bytes, Rate.COPY_OUT, Rate.COPY_IN)

    def disk_s(self, num_bytes: int) -> float:
        """Seconds to copy out, write, read and copy in again."""
        return self.block_s + self._seconds(num_bytes, Rate.COPY_OUT, Rate.DISK_WRITE, Rate.DISK_READ, Rate.COPY_IN)

    def decide(self, victim: Victim, *, has_host: bool, has_disk: bool) -> Decision:
        """The cheapest of the places there are; DROP where none pays; WAIT where it is needed before it could be
        back.
        """
        if victim.next_use_s == float("inf") or not self.pays(
            victim.block_bytes, victim.recompute_tokens, has_host=has_host, has_disk=has_disk
        ):
            return Decision.DROP
        host_s = self.host_s(victim.block_bytes) if has_host else float("inf")
        disk_s = self.disk_s(victim.block_bytes) if has_disk else float("inf")
        if victim.next_use_s < min(host_s, disk_s):
            return Decision.WAIT
        return Decision.HOST if host_s <= disk_s else Decision.DISK

    def pays(self, block_bytes: int, recompute_tokens: int, *, has_host: bool, has_disk: bool) -> bool:
        """Whether one of the places there are is cheaper than computing a block again, whenever it is needed."""
        host_s = self.host_s(block_bytes) if has_host else float("inf")
        seconds = min(host_s, self.disk_s(block_bytes)) if has_disk else host_s
        return seconds != float("inf") and seconds * self._margin <= self.recompute_s(recompute_tokens)

    def _seconds(self, num_bytes: int, *rates: Rate) -> float:
        seconds = 0.0
        for rate in rates:
            per_s = self.rates.get(rate)
            if per_s is None:
                return float("inf")
            seconds += num_bytes / per_s
        return seconds


def measure_copy(*, block_bytes: int, seconds: float = 0.1) -> float:
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
