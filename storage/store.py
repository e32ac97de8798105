"""Keys to wherever their bytes are: a host tier over a disk tier, either of which may be absent.

The consumer calls from one thread and never waits: `put`, `get` and `prefetch` return handles, `poll` moves
everything on and returns the handles that have ended. The memory given to `put` or `get` is the store's until its
handle is returned by `poll` or its `done` is true, whichever is first: with a host tier both copies happen at once,
so the handle is mostly done on return.

Life of a block: free frame → (copied) host slot → (policy's victim) leaving: its frame is being written to disk →
disk slot → arriving: being read into a host frame (`prefetch`) or straight to the consumer (`get`). It is found at
every stage except while arriving for the first time; a block whose move fails is simply no longer found, and a `get`
of it is a miss.

What a put or prefetch displaces is never needed sooner than what it brings (see `Policy.victim`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from batchllm.storage.cost import Decision
from batchllm.storage.disk import DiskTier
from batchllm.storage.frame import Frame, copy_bytes
from batchllm.storage.host import HostTier
from batchllm.storage.policy import NEVER, NextUsePolicy, Policy
from batchllm.storage.tier import MissCause, Outcome, Transfer, TransferKind, payload_view


@dataclass(slots=True)
class BlockUse:
    """What is known of a block's future. `next_use` in the consumer's own unit, rising; `is_kept`: write it to disk
    in any case.
    """

    next_use: float
    recompute_tokens: int = 0
    is_kept: bool = False


@dataclass(slots=True)
class StoreCounters:
    """Totals since the start. Misses count by cause; `num_lost`: blocks whose way to disk failed."""

    num_puts: int = 0
    num_puts_refused: int = 0
    num_gets: int = 0
    num_host_hits: int = 0
    num_disk_hits: int = 0
    misses: dict[MissCause, int] = field(default_factory=dict)
    num_prefetches: int = 0
    num_prefetched: int = 0
    num_spills: int = 0
    num_drops: int = 0
    num_lost: int = 0


@dataclass(slots=True, eq=False)
class _Arrival:
    """A block on its way from disk into a host frame, and who waits for it."""

    frame: Frame
    prefetches: list[Transfer]
    gets: list[tuple[Transfer, memoryview]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _WaitingPut:
    transfer: Transfer
    data: memoryview


class TieredStore:
    """Owns its tiers and closes them. `choose` decides for a host victim between DISK and DROP; None: always DISK."""

    def __init__(
        self,
        *,
        host: HostTier | None,
        disk: DiskTier | None,
        make_policy: Callable[[], Policy] = NextUsePolicy,
        choose: Callable[[bytes, BlockUse], Decision] | None = None,
    ) -> None:
        if host is not None and disk is not None:
            if host.block_bytes != disk.block_bytes:
                raise ValueError(f"host blocks of {host.block_bytes} bytes over disk blocks of {disk.block_bytes}")
            if host.num_spare < 1:
                raise ValueError("a host tier over a disk tier needs at least one spare frame for blocks on their way")
        self.host = host
        self.disk = disk
        self.counters = StoreCounters()
        self._choose = choose
        self._host_policy = make_policy()
        self._disk_policy = make_policy()
        self._uses: dict[bytes, BlockUse] = {}
        self._leaving: dict[bytes, Frame] = {}
        self._arriving: dict[bytes, _Arrival] = {}
        self._keeping: set[bytes] = set()
        self._to_keep: deque[bytes] = deque()
        self._waiting: deque[_WaitingPut] = deque()
        self._waiting_keys: dict[bytes, int] = {}
        self._on_end: dict[int, Callable[[Transfer], None]] = {}
        self._inner: dict[int, Transfer] = {}
        self._finished: list[Transfer] = []
        for key in disk.keys() if disk is not None else ():
            self._uses[key] = BlockUse(NEVER)
            self._disk_policy.touch(key, NEVER)

    # What the consumer calls.

    def contains(self, key: bytes) -> bool:
        """Whether a `get` begun now would find the block, as far as is known without reading it."""
        in_host = self.host is not None and self.host.contains(key)
        return in_host or key in self._leaving or (self.disk is not None and self.disk.contains(key))

    def is_near(self, key: bytes) -> bool:
        """Whether the block lies in memory, so that a `get` begun now would be done on return."""
        return key in self._leaving or (self.host is not None and self.host.contains(key))

    def put(
        self, key: bytes, data: memoryview, *, next_use: float, recompute_tokens: int = 0, keep: bool = False
    ) -> Transfer:
        """Begin to keep a block. Ends DONE (also where it was there already), FULL or FAILED."""
        transfer = Transfer(TransferKind.STORE, key, len(data))
        self.counters.num_puts += 1
        is_known = self.contains(key) or key in self._arriving
        if is_known or key in self._waiting_keys:
            self._uses[key].recompute_tokens = recompute_tokens
            self._uses[key].is_kept |= keep
            self.set_next_use(key, next_use)
        else:
            self._uses[key] = BlockUse(next_use, recompute_tokens, keep)
        if is_known:
            if keep:
                self._to_keep.append(key)
                self._advance()
            return self._end(transfer, Outcome.DONE)
        self._waiting.append(_WaitingPut(transfer, data))
        self._waiting_keys[key] = self._waiting_keys.get(key, 0) + 1
        self._advance()
        return transfer

    def get(self, key: bytes, into: memoryview) -> Transfer:
        """Begin to bring a block's bytes into `into`; the block stays where it is. Ends DONE, MISS, CORRUPT or
        FAILED.
        """
        transfer = Transfer(TransferKind.LOAD, key, len(into))
        self.counters.num_gets += 1
        if self.host is not None and self.host.contains(key):
            self.host.load(key, into)
            if key in self._host_policy:
                self._host_policy.touch(key, self._uses[key].next_use)
        elif key in self._leaving:
            copy_bytes(source=self._leaving[key].payload, target=into)
        elif key in self._arriving:
            self._arriving[key].gets.append((transfer, into))
            return transfer
        elif self.disk is not None and self.disk.contains(key):
            self._begin(self.disk.load(key, into), lambda inner: self._end_direct_get(transfer, inner))
            self._touch_disk(key)
            return transfer
        else:
            return self._end_get(transfer, Outcome.MISS, cause=MissCause.ABSENT)
        self.counters.num_host_hits += 1
        return self._end_get(transfer, Outcome.DONE)

    def prefetch(self, key: bytes, *, next_use: float) -> Transfer:
        """Begin to bring a block from disk into host memory. FULL where that would displace what is needed sooner."""
        transfer = Transfer(TransferKind.LOAD, key, 0)
        self.counters.num_prefetches += 1
        self.set_next_use(key, next_use)
        if self.is_near(key):
            return self._end(transfer, Outcome.DONE)
        if key in self._arriving:
            self._arriving[key].prefetches.append(transfer)
            return transfer
        if self.disk is None or not self.disk.contains(key):
            transfer.cause = MissCause.ABSENT
            return self._end(transfer, Outcome.MISS)
        self._disk_policy.remove(key)  # what is displaced from the host must not take the place of what is to come
        frame = self._make_room(next_use)
        self._touch_disk(key)
        if frame is None:
            return self._end(transfer, Outcome.FULL)
        self._arriving[key] = _Arrival(frame, [transfer])
        self._begin(self.disk.load(key, frame), self._end_arrival)
        return transfer

    def set_next_use(self, key: bytes, next_use: float) -> None:
        """Tell when a block is needed next; unknown keys are none of the store's business."""
        use = self._uses.get(key)
        if use is None:
            return
        use.next_use = next_use
        if key in self._host_policy:
            self._host_policy.touch(key, next_use)
        self._touch_disk(key)

    def drop(self, key: bytes) -> None:
        """The block is not needed any more in this run: its host slot is free at once, its disk slot when another
        needs one.
        """
        self.set_next_use(key, NEVER)
        if key in self._host_policy and not self._is_still_to_keep(key):
            self._discard_from_host(key)

    def poll(self, timeout_s: float = 0.0) -> list[Transfer]:
        """Move everything on; the handles that have ended since the last poll. Waits up to `timeout_s` if all are
        under way.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = 0.0 if self._finished else max(0.0, deadline_s - time.monotonic())
            for transfer in self.disk.poll(left_s if self._on_end else 0.0) if self.disk is not None else ():
                self._inner.pop(id(transfer))
                self._on_end.pop(id(transfer))(transfer)
            if self.host is not None:
                self.host.poll()  # its transfers ended when they began
            self._advance()
            if self._finished or not self._on_end or time.monotonic() >= deadline_s:
                break
        finished, self._finished = self._finished, []
        return finished

    @property
    def num_in_flight(self) -> int:
        """Moves under way and puts that wait for room."""
        return len(self._on_end) + len(self._waiting)

    def close(self) -> None:
        """End what is under way, write what is to be kept, close the tiers. What ended is there for a last `poll`."""
        ended: list[Transfer] = []
        while self._on_end or self._waiting or (self._to_keep and self.disk is not None):
            ended += self.poll(timeout_s=1.0)
        self._finished = ended + self._finished
        for tier in (self.disk, self.host):
            if tier is not None:
                tier.close()

    def check_integrity(self) -> None:
        """Frames, slots and policies agree with each other: nothing is lost, nothing is counted twice."""
        host, disk = self.host, self.disk
        if host is not None:
            num_frames = host.num_blocks + len(self._leaving) + len(self._arriving) + host.num_free_frames
            assert num_frames == host.num_slots + host.num_spare, "a frame is lost"
            assert host.num_blocks == len(self._host_policy) + len(self._keeping), (
                "a host block has no place in the policy"
            )
            assert host.num_blocks + len(self._arriving) <= host.num_slots, "more blocks than slots"
        if disk is not None:
            disk.check_integrity()
            assert all(key in self._disk_policy for key in disk.keys()), "a disk block has no place in the policy"
            assert disk.counters.num_in_flight <= len(self._on_end), "a disk transfer is nobody's"
        counters = self.counters
        num_ended = counters.num_host_hits + counters.num_disk_hits + sum(counters.misses.values())
        assert num_ended <= counters.num_gets, "more gets ended than began"
        if self.num_in_flight == 0:
            assert num_ended == counters.num_gets, "a get has not ended"
            assert not self._leaving and not self._arriving and not self._keeping and not self._waiting_keys

    # Making room.

    def _advance(self) -> None:
        """Place the puts that wait, in order, and start writing what is to be kept."""
        while self._waiting and self._place(self._waiting[0]):
            key = self._waiting.popleft().transfer.key
            self._waiting_keys[key] -= 1
            if not self._waiting_keys[key]:
                del self._waiting_keys[key]
            self._forget_if_gone(key)
        while self._to_keep and self._keep(self._to_keep[0]):
            self._to_keep.popleft()

    def _place(self, put: _WaitingPut) -> bool:
        """Give a put its place or its end; False where it has to wait for a spare frame."""
        key, transfer = put.transfer.key, put.transfer
        if self.contains(key) or key in self._arriving:
            self._end(transfer, Outcome.DONE)
            return True
        use = self._uses[key]
        host = self.host
        if host is None:
            self._put_on_disk(transfer, put.data)
            return True
        payload_view(put.data, block_bytes=host.block_bytes)
        frame = self._make_room(use.next_use)
        if frame is not None:
            copy_bytes(source=put.data, target=frame.payload)
            host.commit(key, frame)
            self._host_policy.touch(key, use.next_use)
            if use.is_kept:
                self._to_keep.append(key)
            self._end(transfer, Outcome.DONE)
            return True
        if host.num_slots and host.num_free == 0 and self._host_policy.victim(use.next_use) and self._leaving:
            return False  # the victim is known and waits for a spare frame
        if self.disk is None or (not use.is_kept and self._decide(key, use) is Decision.DROP):
            self._refuse_put(transfer, Outcome.FULL)
            return True
        frame = host.take_spare()
        if frame is None:
            if self._leaving:
                return False
            self._refuse_put(transfer, Outcome.FULL)
            return True
        copy_bytes(source=put.data, target=frame.payload)
        refused = self._leave(key, frame)
        if refused is None:
            self._end(transfer, Outcome.DONE)
        else:
            self._refuse_put(transfer, refused)
        return True

    def _make_room(self, next_use: float) -> Frame | None:
        """A reserved host frame for a block needed at `next_use`; None where there is none to be had now."""
        host = self.host
        if host is None or host.num_slots == 0:
            return None
        if host.num_free == 0:
            victim = self._host_policy.victim(next_use)
            if victim is None or not self._evict(victim):
                return None
        return host.reserve()

    def _evict(self, key: bytes) -> bool:
        """Free one host slot; False where its block must be written first and there is no spare frame to do that
        from.
        """
        assert self.host is not None
        use = self._uses[key]
        is_below = self.disk is None or self.disk.contains(key)
        if is_below or (not use.is_kept and (use.next_use == NEVER or self._decide(key, use) is Decision.DROP)):
            self._discard_from_host(key)
            return True
        if not self.host.has_spare:
            return False
        self._host_policy.remove(key)
        frame = self.host.detach(key)
        if self._leave(key, frame) is not None:
            self.counters.num_lost += 1
            self._forget_if_gone(key)
        return True

    def _decide(self, key: bytes, use: BlockUse) -> Decision:
        return self._choose(key, use) if self._choose is not None else Decision.DISK

    def _discard_from_host(self, key: bytes) -> None:
        assert self.host is not None
        self._host_policy.remove(key)
        self.host.discard(key)
        self.counters.num_drops += 1
        self._forget_if_gone(key)

    def _forget_if_gone(self, key: bytes) -> None:
        if not self.contains(key) and key not in self._arriving and key not in self._waiting_keys:
            self._uses.pop(key, None)

    # The way to disk.

    def _disk_victim(self, next_use: float) -> bytes | None:
        assert self.disk is not None
        if self.disk.num_free or self.disk.is_refusing:
            return None
        return self._disk_policy.victim(next_use)

    def _store_on_disk(self, key: bytes, data: memoryview | Frame) -> Transfer:
        """Begin a disk store, over the disk policy's victim where the disk is full."""
        assert self.disk is not None
        use = self._uses[key]
        victim = self._disk_victim(use.next_use)
        inner = self.disk.store(key, data, replace=victim)
        if victim is not None and not self.disk.contains(victim):
            self._disk_policy.remove(victim)
            self._forget_if_gone(victim)
        return inner

    def _leave(self, key: bytes, frame: Frame) -> Outcome | None:
        """Write a spare frame's block to disk and release the frame after. The outcome where the disk refused at
        once.
        """
        assert self.host is not None
        inner = self._store_on_disk(key, frame)
        if inner.done and inner.outcome is not Outcome.DONE:
            self._begin(inner, lambda _ended: None)
            self.host.release(frame)
            return inner.outcome
        self.counters.num_spills += 1
        self._leaving[key] = frame
        self._begin(inner, self._end_leaving)
        return None

    def _end_leaving(self, inner: Transfer) -> None:
        assert self.host is not None
        self.host.release(self._leaving.pop(inner.key))
        if inner.outcome is Outcome.DONE:
            self._touch_disk(inner.key)
        else:
            self.counters.num_lost += 1
            self._forget_if_gone(inner.key)

    def _put_on_disk(self, transfer: Transfer, data: memoryview) -> None:
        """A put with no host tier: from the consumer's memory, which stays pinned meanwhile."""
        if self.disk is None:
            self._refuse_put(transfer, Outcome.FULL)
            return
        self._begin(self._store_on_disk(transfer.key, data), lambda inner: self._end_direct_put(transfer, inner))

    def _end_direct_put(self, transfer: Transfer, inner: Transfer) -> None:
        assert inner.outcome is not None
        transfer.errno = inner.errno
        if inner.outcome is Outcome.DONE:
            self._uses.setdefault(inner.key, BlockUse(NEVER))
            self._touch_disk(inner.key)
            self._end(transfer, Outcome.DONE)
        else:
            self._refuse_put(transfer, inner.outcome)

    def _refuse_put(self, transfer: Transfer, outcome: Outcome) -> None:
        self.counters.num_puts_refused += 1
        self._end(transfer, outcome)
        self._forget_if_gone(transfer.key)

    def _is_still_to_keep(self, key: bytes) -> bool:
        return self.disk is not None and self._uses[key].is_kept and not self.disk.contains(key)

    def _keep(self, key: bytes) -> bool:
        """Start writing a block that stays in its host slot; False to try again later. Its slot is pinned meanwhile."""
        if self.disk is None or self.host is None or key not in self._host_policy or self.disk.contains(key):
            return True
        if len(self._on_end) >= self.disk.options.depth:
            return False
        self._host_policy.remove(key)
        self._keeping.add(key)
        self._begin(self._store_on_disk(key, self.host.frame(key)), self._end_keeping)
        return True

    def _end_keeping(self, inner: Transfer) -> None:
        key = inner.key
        self._keeping.discard(key)
        use = self._uses[key]
        self._host_policy.touch(key, use.next_use)
        if inner.outcome is Outcome.DONE:
            self._touch_disk(key)
        else:
            use.is_kept = False  # not to be had; it stays an ordinary block
        if use.next_use == NEVER:
            self._discard_from_host(key)

    # The way from disk.

    def _end_arrival(self, inner: Transfer) -> None:
        assert self.host is not None and inner.outcome is not None
        key = inner.key
        arrival = self._arriving.pop(key)
        if inner.outcome is Outcome.DONE:
            self.host.commit(key, arrival.frame)
            self._host_policy.touch(key, self._uses[key].next_use)
            self.counters.num_prefetched += 1
        for transfer, into in arrival.gets:
            if inner.outcome is Outcome.DONE:
                copy_bytes(source=arrival.frame.payload, target=into)
                self.counters.num_disk_hits += 1
            self._end_get(transfer, inner.outcome, cause=inner.cause, code=inner.errno)
        for transfer in arrival.prefetches:
            transfer.cause, transfer.errno = inner.cause, inner.errno
            self._end(transfer, inner.outcome)
        if inner.outcome is not Outcome.DONE:
            self.host.cancel(arrival.frame)
            self._lose_from_disk(key)

    def _end_direct_get(self, transfer: Transfer, inner: Transfer) -> None:
        assert inner.outcome is not None
        if inner.outcome is Outcome.DONE:
            self.counters.num_disk_hits += 1
        else:
            self._lose_from_disk(inner.key)
        self._end_get(transfer, inner.outcome, cause=inner.cause, code=inner.errno)

    def _lose_from_disk(self, key: bytes) -> None:
        assert self.disk is not None
        if not self.disk.contains(key):
            self._disk_policy.remove(key)
            self._forget_if_gone(key)

    def _touch_disk(self, key: bytes) -> None:
        if self.disk is not None and self.disk.contains(key):
            self._disk_policy.touch(key, self._uses[key].next_use)

    # Handles.

    def _begin(self, inner: Transfer, on_end: Callable[[Transfer], None]) -> None:
        """Call `on_end` when the disk's poll returns this transfer; holding the transfer keeps its id its own."""
        self._inner[id(inner)] = inner
        self._on_end[id(inner)] = on_end

    def _end(self, transfer: Transfer, outcome: Outcome) -> Transfer:
        transfer.outcome = outcome
        self._finished.append(transfer)
        return transfer

    def _end_get(
        self, transfer: Transfer, outcome: Outcome, *, cause: MissCause | None = None, code: int = 0
    ) -> Transfer:
        if outcome is not Outcome.DONE:
            cause = cause or MissCause.IO_ERROR
            self.counters.misses[cause] = self.counters.misses.get(cause, 0) + 1
        transfer.cause, transfer.errno = cause, code
        return self._end(transfer, outcome)
