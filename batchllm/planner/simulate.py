"""What pools and tiers of any size would do for a batch: requests replayed through the tiers' own code, without their bytes.

The store, its policies and the cost table are those that a run uses (`batchllm.storage`); the pool gives up blocks by the same policy
as the tiers. Requests run in the given order, `max_sequences` at once, and the deepest block of a prompt always goes before those it
builds on. Left out: preempted sequences, and reading ahead from disk, which moves the same bytes earlier.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from batchllm.planner.requests import Requests, following_uses
from batchllm.storage.cost import CostTable, Decision, Rate, Victim
from batchllm.storage.ledger import BLOCK_BYTES, LedgerDisk, ledger_host
from batchllm.storage.movement import BlockUse
from batchllm.storage.policy import NEVER, LruPolicy, NextUsePolicy, Policy
from batchllm.storage.store import TieredStore
from batchllm.storage.tier import Outcome

PolicyName = Literal["next-use", "lru", "none"]
POLICIES: tuple[PolicyName, ...] = ("next-use", "lru", "none")

_SPARE_FRAMES = 64
_SOON = 1e9
"""Seconds: nothing is needed so soon that it could not be back (the order of next uses says who waits for whom)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks that each place holds. `max_sequences` run at once."""

    pool: int
    host: int
    disk: int
    max_sequences: int = 1

    @property
    def total(self) -> int:
        return self.pool + self.host + self.disk


@dataclass(frozen=True, slots=True)
class Replay:
    """What one policy did. Blocks of prompts: found in the pool, in host memory, on disk, or computed; bytes moved by direction.

    `num_refused` requests are larger than the pool. Seconds as if nothing hid behind anything: computing what was not found, and
    moving; `compute_s` is None where the rate of computing is not known. `optimum_hits`: the most that any choice with all of the
    capacity in one place could have found.
    """

    policy: PolicyName
    num_requests: int
    num_refused: int
    num_accesses: int
    pool_hits: int
    host_hits: int
    disk_hits: int
    computed_blocks: int
    optimum_hits: int
    host_bytes_in: int
    host_bytes_out: int
    disk_bytes_in: int
    disk_bytes_out: int
    compute_s: float | None
    transfer_s: float | None

    @property
    def num_hits(self) -> int:
        return self.pool_hits + self.host_hits + self.disk_hits

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_accesses if self.num_accesses else 0.0

    @property
    def optimum_rate(self) -> float:
        return self.optimum_hits / self.num_accesses if self.num_accesses else 0.0

    @property
    def moved_bytes(self) -> int:
        return self.host_bytes_in + self.host_bytes_out + self.disk_bytes_in + self.disk_bytes_out

    @property
    def predicted_s(self) -> float | None:
        return None if self.compute_s is None or self.transfer_s is None else self.compute_s + self.transfer_s

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, what is derived included."""
        derived = ("num_hits", "hit_rate", "optimum_rate", "moved_bytes", "predicted_s")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def simulate(
    requests: Requests, *, sizes: Sizes, policy: PolicyName, block_bytes: int, costs: CostTable | None = None
) -> Replay:
    """Replays `requests`. `costs`: rates of the machine; without them every tier is taken to pay, and no time is predicted."""
    simulation = _Simulation(requests, sizes=sizes, policy=policy, block_bytes=block_bytes, costs=costs)
    simulation.run()
    fitting = Requests(simulation.fitting, requests.block_tokens, requests.num_blocks)
    return simulation.result(optimum_hits=best_hits(fitting, capacity=sizes.total))


def best_hits(requests: Requests, *, capacity: int) -> int:
    """Hits of the offline optimum: one cache of `capacity` blocks that knows the whole future and may decline a block."""
    policy, num_hits = NextUsePolicy(), 0
    keys = _Keys()
    for request, uses in zip(requests.requests, following_uses(requests.requests, requests.num_blocks), strict=True):
        for block, use in zip(request.blocks[::-1].tolist(), uses[::-1].tolist(), strict=True):
            key = keys[block]
            if key in policy:
                num_hits += 1
            elif use == NEVER:
                continue
            elif len(policy) >= capacity:
                victim = policy.victim(use)
                if victim is None:
                    continue
                policy.remove(victim)
            if use == NEVER:
                policy.remove(key)
            else:
                policy.touch(key, use)
    return num_hits


class _Keys(dict[int, bytes]):
    """A key of the store for each block number."""

    def __missing__(self, block: int) -> bytes:
        key = self[block] = block.to_bytes(32, "little")
        return key


@dataclass(slots=True)
class _Running:
    """A request whose blocks are in the pool. `uses`: when each is read next."""

    blocks: list[int]
    uses: list[float]
    num_private: int


class _Simulation:
    """One replay. A block of the pool is pinned by the requests that run on it, or known to the pool's policy."""

    def __init__(
        self, requests: Requests, *, sizes: Sizes, policy: PolicyName, block_bytes: int, costs: CostTable | None
    ) -> None:
        self._requests = requests
        self._sizes = sizes
        self.fitting = [each for each in requests.requests if len(each.blocks) + each.num_private <= sizes.pool]
        """The requests that are replayed; the others are larger than the pool."""
        self._name: PolicyName = policy
        self._block_bytes = block_bytes
        self._costs = costs
        make_policy: Callable[[], Policy] = LruPolicy if policy == "lru" else NextUsePolicy
        has_tiers = policy != "none"
        num_disk = sizes.disk if has_tiers else 0
        self._store = TieredStore(
            host=ledger_host(num_slots=sizes.host if has_tiers else 0, num_spare=_SPARE_FRAMES if num_disk else 0),
            disk=LedgerDisk(num_disk) if num_disk else None,
            make_policy=make_policy,
            choose=None if costs is None else self._choose,
        )
        self._is_saved = (
            has_tiers and (sizes.host > 0 or num_disk > 0) and self._decide(has_host=True) is not Decision.DROP
        )
        self._keys = _Keys()
        self._pool = make_policy()
        self._pins: Counter[int] = Counter()
        self._next_use: dict[int, float] = {}
        self._num_private = 0
        self._running: deque[_Running] = deque()
        self._scratch = memoryview(bytearray(BLOCK_BYTES))
        self._num_accesses = self._pool_hits = self._computed = 0

    def run(self) -> None:
        uses_of = following_uses(self.fitting, self._requests.num_blocks)
        for request, uses in zip(self.fitting, uses_of, strict=True):
            if len(self._running) == self._sizes.max_sequences:
                self._finish()
            running = _Running(request.blocks.tolist(), uses.tolist(), request.num_private)
            self._admit(running)
            self._running.append(running)
        while self._running:
            self._finish()
        self._store.poll()
        self._store.check_integrity()

    def result(self, *, optimum_hits: int) -> Replay:
        """The counts so far, in the bytes of real blocks."""
        store, size = self._store, self._block_bytes
        host = None if store.host is None else store.host.counters
        disk = None if store.disk is None else store.disk.counters
        bytes_of = {
            Rate.COPY_OUT: (host.bytes_in if host else 0) * size,
            Rate.COPY_IN: (host.bytes_out if host else 0) * size,
            Rate.DISK_WRITE: (disk.bytes_in if disk else 0) * size,
            Rate.DISK_READ: (disk.bytes_out if disk else 0) * size,
        }
        compute_s = transfer_s = None
        if self._costs is not None:
            rates = self._costs.rates
            if Rate.PREFILL in rates:
                compute_s = self._costs.recompute_s(self._computed * self._requests.block_tokens)
            if all(rate in rates for rate, moved in bytes_of.items() if moved):
                transfer_s = sum(moved / rates[rate] for rate, moved in bytes_of.items() if moved)
        return Replay(
            policy=self._name,
            num_requests=len(self._requests.requests),
            num_refused=len(self._requests.requests) - len(self.fitting),
            num_accesses=self._num_accesses,
            pool_hits=self._pool_hits,
            host_hits=store.counters.num_host_hits,
            disk_hits=store.counters.num_disk_hits,
            computed_blocks=self._computed,
            optimum_hits=optimum_hits,
            host_bytes_in=bytes_of[Rate.COPY_OUT],
            host_bytes_out=bytes_of[Rate.COPY_IN],
            disk_bytes_in=bytes_of[Rate.DISK_WRITE],
            disk_bytes_out=bytes_of[Rate.DISK_READ],
            compute_s=compute_s,
            transfer_s=transfer_s,
        )

    def _admit(self, running: _Running) -> None:
        """Finds what is there, frees room for the rest, and brings it in or computes it."""
        while self._num_missing(running) > self._room(running):
            self._finish()
        absent = []
        for block in running.blocks:
            if self._pins[block] == 0 and self._keys[block] not in self._pool:
                absent.append(block)
            else:
                self._pool.remove(self._keys[block])
            self._pins[block] += 1
        self._num_private += running.num_private
        self._evict(until_free=len(absent), absent=len(absent))
        self._num_accesses += len(running.blocks)
        lost = set(absent)
        is_chain_whole = True
        for block in running.blocks:
            if block not in lost and is_chain_whole:
                self._pool_hits += 1
            elif is_chain_whole and self._restore(self._keys[block]):
                continue
            else:
                is_chain_whole = False
                self._computed += 1

    def _num_missing(self, running: _Running) -> int:
        keys = self._keys
        return running.num_private + sum(
            self._pins[block] == 0 and keys[block] not in self._pool for block in running.blocks
        )

    def _room(self, running: _Running) -> int:
        """Places that are free or could be freed without ending a running request."""
        pinned = sum(count > 0 for count in self._pins.values())
        wanted = sum(self._pins[block] == 0 and self._keys[block] in self._pool for block in running.blocks)
        return self._sizes.pool - pinned - self._num_private - wanted

    def _evict(self, *, until_free: int, absent: int) -> None:
        """Frees `until_free` places for blocks that are pinned already (`absent` of them) but not there yet."""
        while True:
            used = len(self._pool) + len(self._pins) - absent + self._num_private
            if self._sizes.pool - used >= until_free:
                return
            key = self._pool.victim(-1.0)
            assert key is not None, "a pool without a victim has room"
            self._pool.remove(key)
            block = int.from_bytes(key, "little")
            if self._is_saved:
                self._store.put(
                    key, self._scratch, next_use=self._next_use[block], recompute_tokens=self._requests.block_tokens
                )
                self._store.poll()

    def _restore(self, key: bytes) -> bool:
        """Whether a block came back from a tier. Its copy there is the first to go from now on: the pool has the block."""
        if not self._store.contains(key):
            return False
        transfer = self._store.get(key, self._scratch)
        while not transfer.done:
            self._store.poll()
        self._store.set_next_use(key, NEVER)
        return transfer.outcome is Outcome.DONE

    def _finish(self) -> None:
        """The request that began first ends: its blocks stay while there is room and a later one reads them."""
        ended = self._running.popleft()
        self._num_private -= ended.num_private
        for block, use in zip(reversed(ended.blocks), reversed(ended.uses), strict=True):
            self._pins[block] -= 1
            key = self._keys[block]
            if self._pins[block] == 0:
                del self._pins[block]
                self._next_use[block] = use
                if use == NEVER:
                    self._store.drop(key)
                else:
                    self._pool.touch(key, use)

    def _choose(self, key: bytes, use: BlockUse) -> Decision:
        return self._decide(has_host=False)

    def _decide(self, *, has_host: bool) -> Decision:
        if self._costs is None:
            return Decision.HOST
        victim = Victim(block_bytes=self._block_bytes, recompute_tokens=self._requests.block_tokens, next_use_s=_SOON)
        return self._costs.decide(victim, has_host=has_host and self._sizes.host > 0, has_disk=self._sizes.disk > 0)
