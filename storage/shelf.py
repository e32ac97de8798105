"""The disk tier as the tiered store uses it: with a policy that names victims, and a call back for each end."""

from __future__ import annotations

from collections.abc import Callable

from batchllm.storage.frame import Frame
from batchllm.storage.policy import NEVER, Policy
from batchllm.storage.tier import LowerTier, Transfer

OnEnd = Callable[[Transfer], None]


class DiskShelf:
    """Owns the bookkeeping around `disk`; with no disk it holds nothing and finds nothing.

    `on_displaced` is told of each block that lost its slot to another.
    """

    def __init__(self, disk: LowerTier | None, *, policy: Policy, on_displaced: Callable[[bytes], None]) -> None:
        self.disk = disk
        self._policy = policy
        self._on_displaced = on_displaced
        self._under_way: dict[int, tuple[Transfer, OnEnd]] = {}
        for key in disk.keys() if disk is not None else ():
            policy.touch(key, NEVER)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def has_depth(self) -> bool:
        """Whether a store that can wait should be begun now: not behind a queue that is full."""
        return self.disk is not None and len(self._under_way) < self.disk.depth

    def contains(self, key: bytes) -> bool:
        return self.disk is not None and self.disk.contains(key)

    def store(self, key: bytes, data: memoryview | Frame, *, next_use: float, on_end: OnEnd) -> Transfer:
        """Begin to store, over the policy's victim where the disk is full. `on_end` runs inside a later `poll`."""
        assert self.disk is not None
        victim = None
        if self.disk.num_free == 0 and not self.disk.is_refusing:
            victim = self._policy.victim(next_use)
        transfer = self.disk.store(key, data, replace=victim)
        self._under_way[id(transfer)] = (transfer, on_end)
        if victim is not None and not self.disk.contains(victim):
            self._policy.remove(victim)
            self._on_displaced(victim)
        return transfer

    def load(self, key: bytes, into: memoryview | Frame, *, on_end: OnEnd) -> None:
        """Begin to load; `on_end` runs inside a later `poll`."""
        assert self.disk is not None
        transfer = self.disk.load(key, into)
        self._under_way[id(transfer)] = (transfer, on_end)

    def touch(self, key: bytes, next_use: float) -> None:
        """Tell the policy of a block that lies on disk; any other key changes nothing."""
        if self.contains(key):
            self._policy.touch(key, next_use)

    def hold(self, key: bytes) -> None:
        """Let no store displace this block until it is touched again."""
        self._policy.remove(key)

    def poll(self, timeout_s: float) -> None:
        """Run the call backs of what has ended; waits up to `timeout_s` for the first if some are under way."""
        if self.disk is None:
            return
        for transfer in self.disk.poll(timeout_s if self._under_way else 0.0):
            _transfer, on_end = self._under_way.pop(id(transfer))
            if not self.disk.contains(transfer.key):
                self._policy.remove(transfer.key)
            on_end(transfer)

    def check_integrity(self) -> None:
        """Each block on disk, and no other, is in the policy, and each transfer has its call back."""
        if self.disk is None:
            return
        self.disk.check_integrity()
        assert all(key in self._policy for key in self.disk.keys()), "a disk block has no place in the policy"
        assert len(self._policy) == len(self.disk.keys()), "the policy knows blocks that are not on disk"
        assert self.disk.counters.num_in_flight <= len(self._under_way), "a disk transfer is nobody's"
