"""Which prefix nodes go first, kept in order while next uses move: what the naive way sorts anew each time, for a few heap steps a node.

Plan positions rise, and with them next uses. Entries that are no longer true stay in their heap until they come up (lazy deletion), and a
heap that holds more of them than live ones is built anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

import numpy as np

from batchllm.planner.lifetime import NextUses


class EvictionOrder(Protocol):
    """Nodes of which the one to give up first can be taken."""

    def add(self, node: int) -> None:
        """Put in a node that is not in it."""

    def discard(self, node: int) -> None:
        """Take out a node, if it is in it."""

    def pop(self, position: int) -> int | None:
        """Take out the node that goes first at plan position `position`; None where there is none."""


class LargestFirst:
    """Nodes by a value that may have fallen since it was last looked at, the largest first; of equal values the deepest node's, then the
    first node's.
    """

    def __init__(self, end: np.ndarray) -> None:
        """`end`: of each node, int `[M]`, as in `PrefixTree`."""
        self._end = end
        self._value: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []

    def value(self, node: int) -> int:
        """As it was when it was last looked at."""
        return self._value[node]

    def put(self, node: int, value: int) -> None:
        """Put in a node, or give it another value."""
        self._value[node] = value
        if len(self._heap) > 2 * len(self._value) + 64:
            self._heap = [self._entry(*item) for item in self._value.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, self._entry(node, value))

    def discard(self, node: int) -> None:
        self._value.pop(node, None)

    def pop(self, value_of: Callable[[int], int]) -> int | None:
        """Take out the node with the largest value; `value_of` gives those of now, none above the one that was put."""
        while self._heap:
            negative, _negative_end, node = heapq.heappop(self._heap)
            if self._value.get(node) != -negative:
                continue
            value = value_of(node)
            if value == -negative:
                del self._value[node]
                return node
            self.put(node, value)
        return None

    def _entry(self, node: int, value: int) -> tuple[int, int, int]:
        return -value, -int(self._end[node]), node


class SoonestUseFirst:
    """Nodes by next use, those that are needed soon first. Next uses may have risen since they were given."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def put(self, node: int, use: int) -> None:
        """Put in a node, or give it another next use."""
        self._live[node] = use
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [(use, node) for node, use in self._live.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (use, node))

    def discard(self, node: int) -> None:
        self._live.pop(node, None)

    @property
    def is_empty(self) -> bool:
        return not self._live

    def pop_until(self, last: int, use_of: Callable[[int], int]) -> list[tuple[int, int]]:
        """Take out the nodes with next uses up to `last`, soonest first: (node, next use). `use_of` gives those of now."""
        due: list[tuple[int, int]] = []
        while self._heap and self._heap[0][0] <= last:
            use, node = heapq.heappop(self._heap)
            if self._live.get(node) != use:
                continue
            now = use_of(node)
            if now != use:
                self.put(node, now)
                continue
            del self._live[node]
            due.append((node, use))
        return due


class FarthestUseFirst:
    """An `EvictionOrder`: the node whose next use is farthest goes first."""

    def __init__(self, next_uses: NextUses, end: np.ndarray) -> None:
        self._next_uses = next_uses
        self._nodes = LargestFirst(end)
        self._new: set[int] = set()
        self._coming = SoonestUseFirst()  # the same nodes: a next use rises only when the position has passed it

    def add(self, node: int) -> None:
        self._new.add(node)

    def discard(self, node: int) -> None:
        self._new.discard(node)
        self._nodes.discard(node)
        self._coming.discard(node)

    def pop(self, position: int) -> int | None:
        def use_of(node: int) -> int:
            use = self._next_uses.of(node, position)
            self._coming.put(node, use)
            return use

        passed = [node for node, _use in self._coming.pop_until(position - 1, self._nodes.value)]
        for node in (*self._new, *passed):
            self._nodes.put(node, use_of(node))
        self._new.clear()
        popped = self._nodes.pop(use_of)
        if popped is not None:
            self._coming.discard(popped)
        return popped


class LeastRecentFirst:
    """An `EvictionOrder`: the node that was found longest ago goes first, for comparison."""

    def __init__(self, last_step: Callable[[int], int], end: np.ndarray) -> None:
        """`last_step` of a node: when it was last found; never falls."""
        self._last_step = last_step
        self._nodes = LargestFirst(end)

    def add(self, node: int) -> None:
        self._nodes.put(node, -self._last_step(node))

    def discard(self, node: int) -> None:
        self._nodes.discard(node)

    def pop(self, position: int) -> int | None:
        return self._nodes.pop(lambda node: -self._last_step(node))
