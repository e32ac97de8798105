"""Keys to wherever their bytes are: a host tier over a disk tier, either of which may be absent.

The consumer calls from one thread and never waits: `put`, `get` and `prefetch` return handles, `poll` moves everything
on and returns the handles that have ended. The memory given to `put` or `get` is the store's until its handle is
`done`. A handle that is not done on return ends inside a `poll`; with a host tier the copies happen at once, so most
are done.

Life of a block: consumer's memory → host slot → (the policy's victim) leaving: its frame is being written to disk
→ disk slot → arriving: being read into a host frame (`prefetch`), or read straight to the consumer (`get`). It is
found at every stage; one whose move fails is simply no longer found, and a `get` of it is a miss.

For a disk alone, a host tier of no slots and some spare frames is better than none: a put then copies and is done,
while without one the consumer's memory stays pinned, and the block hidden, until it is written.

What a put or prefetch displaces is never needed sooner than what it brings (see `Policy.victim`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from batchllm.storage.cost import Decision
from batchllm.storage.frame import CopyChecksum, Frame, copy_bytes, copy_checksum
from batchllm.storage.host import HostTier
from batchllm.storage.movement import Arrival, BlockUse, Departure, StoreCounters
from batchllm.storage.policy import NEVER, NextUsePolicy, Policy
from batchllm.storage.shelf import DiskShelf
from batchllm.storage.tier import LowerTier, MissCause, Outcome, Transfer, TransferKind, payload_view


class TieredStore:
    """Owns its tiers and closes them. `choose` decides for a host victim between DISK and DROP; None: always DISK."""

    def __init__(
        self,
        *,
        host: HostTier | None,
        disk: LowerTier | None,
        make_policy: Callable[[], Policy] = NextUsePolicy,
        choose: Callable[[bytes, BlockUse], Decision] | None = None,
        copy_checksum: CopyChecksum = copy_checksum,
    ) -> None:
        if host is not None and disk is not None:
            if host.block_bytes != disk.block_bytes:
                raise ValueError(f"host blocks of {host.block_bytes} bytes over disk blocks of {disk.block_bytes}")
            if host.num_spare < 1:
                raise ValueError("a host tier over a disk tier needs at least one spare frame for blocks on their way")
        tier = host or disk
        if tier is None:
            raise ValueError("a store needs a tier, if only one without slots")
        self.host = host
        self.disk = disk
        self.block_bytes = tier.block_bytes
        self.counters = StoreCounters()
        self._choose = choose
        self._copy_checksum = copy_checksum
        self._host_policy = make_policy()
        self._shelf = DiskShelf(disk, policy=make_policy(), on_displaced=self._forget_if_gone)
        self._adopted = frozenset(disk.keys() if disk is not None else ())  # blocks of earlier runs
        self._uses = {key: BlockUse(NEVER) for key in self._adopted}
        self._leaving: dict[bytes, Departure] = {}
        self._arriving: dict[bytes, Arrival] = {}
        self._keeping: set[bytes] = set()  # in the host, being written to disk, and not to be moved meanwhile
        self._to_keep: deque[bytes] = deque()
        self._waiting: deque[tuple[Transfer, memoryview]] = deque()  # puts
        self._waiting_keys: dict[bytes, int] = {}
        self._finished: list[Transfer] = []

    # What the consumer calls.

    def contains(self, key: bytes) -> bool:
        """Whether a `get` begun now would find the block, as far as is known without reading it."""
        return self._is_held(key) or key in self._waiting_keys

    def is_near(self, key: bytes) -> bool:
        """Whether the block lies in memory, so that a `get` begun now would be done on return."""
        in_host = self.host is not None and self.host.contains(key)
        return in_host or key in self._leaving or key in self._waiting_keys

    def put(
        self, key: bytes, data: memoryview, *, next_use: float, recompute_tokens: int = 0, keep: bool = False
    ) -> Transfer:
        """Begin to keep a block. Ends DONE (also where it was there already), FULL or FAILED."""
        view = payload_view(data, block_bytes=self.block_bytes)
        transfer = Transfer(TransferKind.STORE, key, self.block_bytes)
        self.counters.num_puts += 1
        is_known = self._is_held(key) and key not in self._arriving
        if key in self._uses:
            self._uses[key].recompute_tokens = recompute_tokens
            self._uses[key].is_kept |= keep
            self.set_next_use(key, next_use)
        else:
            self._uses[key] = BlockUse(next_use, recompute_tokens, keep)
        if is_known:
            if keep:
                self._to_keep.append(key)
            self._end(transfer, Outcome.DONE)
        elif not self._waiting and self._place(transfer, view):
            self._forget_if_gone(key)
        else:
            self._waiting.append((transfer, view))
            self._waiting_keys[key] = self._waiting_keys.get(key, 0) + 1
        self._advance()
        return transfer

    def get(self, key: bytes, into: memoryview) -> Transfer:
        """Begin to bring a block's bytes into `into`; which stays where it is. Ends DONE, MISS, CORRUPT or FAILED."""
        view = payload_view(into, block_bytes=self.block_bytes)
        transfer = Transfer(TransferKind.LOAD, key, self.block_bytes)
        self.counters.num_gets += 1
        if self.host is not None and self.host.contains(key):
            self.host.load(key, view)
            if key in self._host_policy:
                self._host_policy.touch(key, self._uses[key].next_use)
        elif key in self._leaving:
            copy_bytes(source=self._leaving[key].frame.payload, target=view)
        elif key in self._arriving:
            self._arriving[key].gets.append((transfer, view))
            return transfer
        elif self._shelf.contains(key):
            self._shelf.load(key, view, on_end=lambda inner: self._end_get_from_disk(transfer, inner))
            self._note_use(key)
            return transfer
        elif key in self._waiting_keys:
            copy_bytes(source=next(data for put, data in self._waiting if put.key == key), target=view)
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
        if not self._shelf.contains(key):
            transfer.cause = MissCause.ABSENT
            return self._end(transfer, Outcome.MISS)
        self._shelf.hold(key)  # what it displaces from the host must not take its place on disk
        frame = self._make_room(next_use)
        self._note_use(key)
        if frame is None:
            return self._end(transfer, Outcome.FULL)
        self._arriving[key] = Arrival(frame, [transfer])
        self._shelf.load(key, frame, on_end=self._end_arrival)
        return transfer

    def set_next_use(self, key: bytes, next_use: float) -> None:
        """Tell when a block is needed next; unknown keys are none of the store's business."""
        use = self._uses.get(key)
        if use is None:
            return
        use.next_use = next_use
        if key in self._host_policy:
            self._host_policy.touch(key, next_use)
        self._shelf.touch(key, use.disk_use)

    def drop(self, key: bytes) -> None:
        """The block is not needed any more in this run.

        Its host slot is free at once, unless it is still to be kept; its disk slot when another block needs one.
        """
        self.set_next_use(key, NEVER)
        if key in self._host_policy:
            is_still_to_keep = self.disk is not None and self._uses[key].is_kept and not self._shelf.contains(key)
            if not is_still_to_keep:
                self._discard_from_host(key)

    def drop_before(self, next_use: float) -> None:
        """`drop` of every block whose next use has gone by: nothing else would ever displace it."""
        for key in [key for key, use in self._uses.items() if use.next_use < next_use]:
            self.drop(key)

    def poll(self, timeout_s: float = 0.0) -> list[Transfer]:
        """Move everything on; the handles that have ended since the last poll, each returned once.

        Waits up to `timeout_s` for the first, if moves are under way.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._shelf.poll(0.0 if self._finished else max(0.0, deadline_s - time.monotonic()))
            if self.host is not None:
                self.host.poll()  # its transfers ended when they began
            self._advance()
            if self._finished or not self._shelf.num_under_way or time.monotonic() >= deadline_s:
                break
        finished, self._finished = self._finished, []
        return finished

    @property
    def is_empty(self) -> bool:
        """Whether no `get` begun now would find anything."""
        return not self._uses

    @property
    def is_quiet(self) -> bool:
        """Whether a `poll` would move nothing on and return nothing."""
        return not self._finished and not self.num_in_flight

    @property
    def num_in_flight(self) -> int:
        """Moves under way, puts that wait for room, blocks that wait to be kept."""
        return self._shelf.num_under_way + len(self._waiting) + len(self._to_keep)

    def close(self) -> None:
        """End what is under way, write what is to be kept, close the tiers. What ended is there for a last `poll`."""
        ended: list[Transfer] = []
        while self.num_in_flight:
            ended += self.poll(timeout_s=1.0)
        self._finished = ended + self._finished
        for tier in (self.disk, self.host):
            if tier is not None:
                tier.close()

    def check_integrity(self) -> None:
        """Frames, slots and policies agree with each other: nothing is lost, nothing is counted twice."""
        host = self.host
        if host is not None:
            num_frames = host.num_blocks + len(self._leaving) + len(self._arriving) + host.num_free_frames
            assert num_frames == host.num_slots + host.num_spare, "a frame is lost"
            assert host.num_blocks == len(self._host_policy) + len(self._keeping), "the host policy lacks a block"
            assert host.num_blocks + len(self._arriving) <= host.num_slots, "more blocks than slots"
        self._shelf.check_integrity()
        counters = self.counters
        num_ended = counters.num_host_hits + counters.num_disk_hits + sum(counters.misses.values())
        assert num_ended <= counters.num_gets, "more gets ended than began"
        if self.num_in_flight == 0:
            assert num_ended == counters.num_gets, "a get has not ended"
            assert not self._leaving and not self._arriving and not self._keeping and not self._waiting_keys
            assert all(self.contains(key) for key in self._uses), "a block that is gone is still accounted for"

    # Making room.

    def _advance(self) -> None:
        """Place the puts that wait, in order, and start writing what is to be kept."""
        while self._waiting and self._place(*self._waiting[0]):
            key = self._waiting.popleft()[0].key
            self._waiting_keys[key] -= 1
            if not self._waiting_keys[key]:
                del self._waiting_keys[key]
            self._forget_if_gone(key)
        while self._to_keep and self._keep(self._to_keep[0]):
            self._to_keep.popleft()

    def _place(self, transfer: Transfer, data: memoryview) -> bool:
        """Give a put its place or its end; False where it has to wait for a move that is under way."""
        key, host = transfer.key, self.host
        if key in self._arriving:
            return False  # if that fails, these bytes are needed
        if self._is_held(key):
            self._end(transfer, Outcome.DONE)
            return True
        use = self._uses[key]
        if host is None:
            self._put_on_disk(transfer, data)
            return True
        frame = self._make_room(use.next_use)
        if frame is not None:
            self._fill(frame, data)
            host.commit(key, frame)
            self._host_policy.touch(key, use.next_use)
            if use.is_kept:
                self._to_keep.append(key)
            self._end(transfer, Outcome.DONE)
            return True
        has_victim = host.num_free == 0 and self._host_policy.victim(use.next_use) is not None
        if has_victim and self._leaving:
            return False  # it gets the victim's slot as soon as that has a spare frame to leave from
        if self.disk is None or self._is_dropped(key, use):
            self._refuse_put(transfer, Outcome.FULL)
            return True
        spare = host.take_spare()
        if spare is None:
            if self._leaving:
                return False
            self._refuse_put(transfer, Outcome.FULL)
            return True
        self._fill(spare, data)
        refused = self._leave(key, spare)
        if refused is None:
            self._end(transfer, Outcome.DONE)
        else:
            self._refuse_put(transfer, refused)
        return True

    def _fill(self, frame: Frame, data: memoryview) -> None:
        if self.disk is not None:
            frame.payload_checksum = self._copy_checksum(source=data, target=frame.payload)
        else:
            copy_bytes(source=data, target=frame.payload)

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
        """Free one host slot; False where its block must be written first and has no spare frame to leave from."""
        assert self.host is not None
        use = self._uses[key]
        if self.disk is None or self._shelf.contains(key) or self._is_dropped(key, use):
            self._discard_from_host(key)
            return True
        if not self.host.has_spare:
            return False
        self._host_policy.remove(key)
        if self._leave(key, self.host.detach(key)) is not None:
            self.counters.num_lost += 1
            self._forget_if_gone(key)
        return True

    def _is_dropped(self, key: bytes, use: BlockUse) -> bool:
        """Whether a block that leaves memory is not worth the disk."""
        if use.is_kept:
            return False
        return use.next_use == NEVER or (self._choose is not None and self._choose(key, use) is Decision.DROP)

    def _discard_from_host(self, key: bytes) -> None:
        assert self.host is not None
        self._host_policy.remove(key)
        self.host.discard(key)
        self.counters.num_drops += 1
        self._forget_if_gone(key)

    def _forget_if_gone(self, key: bytes) -> None:
        if not self.contains(key) and key not in self._arriving:
            self._uses.pop(key, None)

    def _is_held(self, key: bytes) -> bool:
        in_host = self.host is not None and self.host.contains(key)
        return in_host or key in self._leaving or self._shelf.contains(key)

    # The way to disk.

    def _leave(self, key: bytes, frame: Frame) -> Outcome | None:
        """Write a spare frame's block to disk and release the frame after. The outcome if the disk refused at once."""
        assert self.host is not None
        departure = self._leaving[key] = Departure(frame)
        inner = self._shelf.store(
            key,
            frame,
            next_use=self._uses[key].disk_use,
            on_end=lambda ended: self._end_leaving(ended, departure),
        )
        if inner.done and inner.outcome is not Outcome.DONE:
            departure.is_refused = True
            del self._leaving[key]
            self.host.release(frame)
            return inner.outcome
        self.counters.num_spills += 1
        return None

    def _end_leaving(self, inner: Transfer, departure: Departure) -> None:
        if departure.is_refused:
            return
        assert self.host is not None
        del self._leaving[inner.key]
        self.host.release(departure.frame)
        if inner.outcome is Outcome.DONE:
            self._shelf.touch(inner.key, self._uses[inner.key].disk_use)
        else:
            self.counters.num_lost += 1
            self._forget_if_gone(inner.key)

    def _put_on_disk(self, transfer: Transfer, data: memoryview) -> None:
        """A put with no host tier: from the consumer's memory, which stays the store's meanwhile."""
        use = self._uses[transfer.key]

        def end(inner: Transfer) -> None:
            assert inner.outcome is not None
            transfer.errno = inner.errno
            if inner.outcome is Outcome.DONE:
                self._shelf.touch(inner.key, self._uses.setdefault(inner.key, use).disk_use)
                self._end(transfer, Outcome.DONE)
            else:
                self._refuse_put(transfer, inner.outcome)

        self._shelf.store(transfer.key, data, next_use=use.disk_use, on_end=end)

    def _refuse_put(self, transfer: Transfer, outcome: Outcome) -> None:
        self.counters.num_puts_refused += 1
        self._end(transfer, outcome)
        self._forget_if_gone(transfer.key)

    def _keep(self, key: bytes) -> bool:
        """Start writing a block that stays in its host slot; False to try again later. It is not moved meanwhile."""
        if self.host is None or self.disk is None or key not in self._host_policy or self._shelf.contains(key):
            return True
        if not self._shelf.has_depth:
            return False
        self._host_policy.remove(key)
        self._keeping.add(key)
        frame, next_use = self.host.frame(key), self._uses[key].disk_use
        self._shelf.store(key, frame, next_use=next_use, on_end=self._end_keeping)
        return True

    def _end_keeping(self, inner: Transfer) -> None:
        key = inner.key
        self._keeping.discard(key)
        use = self._uses[key]
        self._host_policy.touch(key, use.next_use)
        self._shelf.touch(key, use.disk_use)
        if inner.outcome is not Outcome.DONE:
            use.is_kept = False  # not to be had: from now on it is a block like any other
        if use.next_use == NEVER:
            self._discard_from_host(key)

    # The way from disk.

    def _note_use(self, key: bytes) -> None:
        """A block is read from disk: one of an earlier run that this run uses is kept for the next one."""
        use = self._uses[key]
        use.is_kept |= key in self._adopted
        self._shelf.touch(key, use.disk_use)

    def _end_arrival(self, inner: Transfer) -> None:
        assert self.host is not None and inner.outcome is not None
        key = inner.key
        arrival = self._arriving.pop(key)
        is_there = inner.outcome is Outcome.DONE
        if is_there:
            self.host.commit(key, arrival.frame)
            self._host_policy.touch(key, self._uses[key].next_use)
            self.counters.num_prefetched += 1
        else:
            self.host.cancel(arrival.frame)
            self._forget_if_gone(key)
        for transfer, into in arrival.gets:
            if is_there:
                copy_bytes(source=arrival.frame.payload, target=into)
            self._end_get_from_disk(transfer, inner)
        for transfer in arrival.prefetches:
            transfer.cause, transfer.errno = inner.cause, inner.errno
            self._end(transfer, inner.outcome)

    def _end_get_from_disk(self, transfer: Transfer, inner: Transfer) -> None:
        assert inner.outcome is not None
        self.counters.num_disk_hits += inner.outcome is Outcome.DONE
        self._forget_if_gone(inner.key)
        self._end_get(transfer, inner.outcome, cause=inner.cause, code=inner.errno)

    # Handles.

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
