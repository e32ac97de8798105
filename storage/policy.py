"""Which block gives up its place. Bookkeeping of keys and next uses only; who holds the bytes asks and acts."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from typing import Protocol

NEVER = math.inf


class Policy(Protocol):
    """An order of keys by how soon they may go. Keys that must stay for now are `remove`d and put back by `touch`."""

    def touch(self, key: bytes, next_use: float) -> None:
        """Add a key or renew it: just used or stored, next needed at `next_use` (`NEVER`: first to go)."""

    def remove(self, key: bytes) -> None:
        """Forget a key, if it is known."""

    def victim(self, incoming: float) -> bytes | None:
        """The key to give up for one next needed at `incoming`; None where every key here is worth more than that."""

    def __contains__(self, key: bytes) -> bool: ...

    def __len__(self) -> int: ...


class NextUsePolicy:
    """Gives up the block whose next use is farthest: with known next uses no other choice hits more (Belady).

    Touch and victim cost O(log n): a heap in which outdated entries are skipped, rebuilt when they outnumber the live
    ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bytes]] = []
        self._live: dict[bytes, tuple[float, int]] = {}
        self._stamps = itertools.count()

    def touch(self, key: bytes, next_use: float) -> None:
        stamp = next(self._stamps)
        self._live[key] = (next_use, stamp)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [(-use, mark, name) for name, (use, mark) in self._live.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (-next_use, stamp, key))

    def remove(self, key: bytes) -> None:
        self._live.pop(key, None)

    def victim(self, incoming: float) -> bytes | None:
        while self._heap:
            negative_use, stamp, key = self._heap[0]
            if self._live.get(key) == (-negative_use, stamp):
                return key if -negative_use > incoming else None
            heapq.heappop(self._heap)
        return None

    def __contains__(self, key: bytes) -> bool:
        return key in self._live

    def __len__(self) -> int:
        return len(self._live)


class LruPolicy:
    """Gives up the block that was touched longest ago, whatever comes: what an engine does that knows no future."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def touch(self, key: bytes, next_use: float) -> None:
        self._order[key] = None
        self._order.move_to_end(key, last=next_use != NEVER)

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)

    def victim(self, incoming: float) -> bytes | None:
        return next(iter(self._order), None)

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)
