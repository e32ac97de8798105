"""A queue of reads and writes on one file, kept deep: the seam under the disk tier.

A queue belongs to the one thread that opened it; only `wake` may be called from others. Memory named in a submitted
operation belongs to the queue until its completion was returned.

Named tuples, not dataclasses: several are made for each block, and a frozen dataclass costs four times as much to make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Operation(NamedTuple):
    """Read into or write from `view`, whose first byte is at `address`, at `offset` in the file. `tag` is above 0."""

    tag: int
    is_write: bool
    view: memoryview
    address: int
    offset: int


class Completion(NamedTuple):
    """`result`: bytes moved, or minus an errno."""

    tag: int
    result: int


class SubmissionQueue(Protocol):
    """Operations go in, completions come out in any order."""

    name: str

    def submit(self, operation: Operation) -> None:
        """Accept an operation. OSError: it was not accepted (EAGAIN, EBUSY: wait for completions, then offer it
        again).
        """

    def begin(self) -> None:
        """Let the kernel see what was accepted, together; `wait` does so too."""

    def wait(self) -> list[Completion]:
        """Block until something completes or `wake` is called; all completions there are (none after a mere wake)."""

    def wake(self) -> None:
        """Make a `wait`, now or next, return. From any thread."""

    def close(self) -> None:
        """Wait for what is in flight, then let go of the queue. The file stays open."""


OpenQueue = Callable[[int, int], SubmissionQueue]
