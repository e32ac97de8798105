"""The seam between a block's owner and the places its bytes can be: `Tier`, its `Transfer` handles and its counters.

Rules that every tier keeps:
- A block is found only when it is whole; a store that fails leaves nothing, and a load that does not end in `DONE`
  leaves its target's bytes unspecified.
- `store` and `load` return at once. The memory they were given belongs to the tier until `poll` has returned their
  transfer; each transfer is returned by exactly one `poll`, even one that was finished when `store` or `load`
  returned.
- A full tier makes room only by `replace`: who knows the future chooses the victim, the tier never does.
- No fault of a device raises: a block that is damaged or gone ends in `CORRUPT`, `MISS` or `FAILED`, and is no longer
  found.
- One thread calls a tier.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from batchllm.storage.frame import Frame


class Outcome(enum.Enum):
    """How a transfer ended."""

    DONE = "done"
    MISS = "miss"  # load: no such block
    CORRUPT = "corrupt"  # load: there was one, and it did not check out
    FAILED = "failed"  # the device refused; `Transfer.errno` says why
    FULL = "full"  # store: no room, and no victim named


class MissCause(enum.Enum):
    """Why a load brought nothing."""

    ABSENT = "absent"
    TRUNCATED = "truncated"
    HEADER = "header"
    OTHER_KEY = "other_key"
    OTHER_MODEL = "other_model"
    CHECKSUM = "checksum"
    IO_ERROR = "io_error"


class TransferKind(enum.Enum):
    STORE = "store"
    LOAD = "load"


@dataclass(slots=True, eq=False)
class Transfer:
    """A store or load on its way; `outcome` is None until it has ended."""

    kind: TransferKind
    key: bytes
    num_bytes: int
    outcome: Outcome | None = None
    cause: MissCause | None = None
    errno: int = 0

    @property
    def done(self) -> bool:
        return self.outcome is not None


@dataclass(slots=True)
class TierCounters:
    """Totals since the tier was opened. `stores + loads` begun equal those ended plus those in flight."""

    num_stores: int = 0
    num_stored: int = 0
    num_store_full: int = 0
    num_store_failed: int = 0
    num_loads: int = 0
    num_hits: int = 0
    misses: dict[MissCause, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    busy_s: float = 0.0

    def begin(self, transfer: Transfer) -> None:
        if transfer.kind is TransferKind.STORE:
            self.num_stores += 1
        else:
            self.num_loads += 1

    def end(self, transfer: Transfer) -> None:
        """Book an ended transfer under its outcome."""
        assert transfer.outcome is not None
        if transfer.kind is TransferKind.LOAD:
            if transfer.outcome is Outcome.DONE:
                self.num_hits += 1
                self.bytes_out += transfer.num_bytes
            else:
                cause = transfer.cause or MissCause.IO_ERROR
                self.misses[cause] = self.misses.get(cause, 0) + 1
        elif transfer.outcome is Outcome.DONE:
            self.num_stored += 1
            self.bytes_in += transfer.num_bytes
        elif transfer.outcome is Outcome.FULL:
            self.num_store_full += 1
        else:
            self.num_store_failed += 1

    @property
    def num_in_flight(self) -> int:
        ended = (
            self.num_stored + self.num_store_full + self.num_store_failed + self.num_hits + sum(self.misses.values())
        )
        return self.num_stores + self.num_loads - ended


class Tier(Protocol):
    """Where blocks of `block_bytes` bytes can be kept under 32-byte keys."""

    block_bytes: int
    num_slots: int

    @property
    def counters(self) -> TierCounters: ...

    def contains(self, key: bytes) -> bool:
        """Whether a load begun now would find the block whole, as far as is known without reading it."""

    def store(self, key: bytes, data: memoryview | Frame, *, replace: bytes | None = None) -> Transfer:
        """Begin to keep a block; a key that is there already is done. `replace` names the block to give up if there
        is no room.

        A `Frame` is stored from where it lies; its header page is the tier's to write.
        """

    def load(self, key: bytes, into: memoryview | Frame) -> Transfer:
        """Begin to bring a block's bytes into `into`."""

    def poll(self, timeout_s: float = 0.0) -> list[Transfer]:
        """Transfers that have ended since the last poll; waits up to `timeout_s` for the first one under way."""

    def close(self) -> None:
        """End what is in flight and let go of files and threads. What ended is still there for a last `poll`."""


class LowerTier(Tier, Protocol):
    """What the tiered store asks of the tier below memory, beside what every tier does. `backend` says how it works."""

    backend: str

    @property
    def depth(self) -> int:
        """Stores and loads that are worth having under way at once."""

    @property
    def num_free(self) -> int:
        """Slots that hold no block and are not being written."""

    @property
    def is_refusing(self) -> bool:
        """Whether stores are refused for now because writes failed."""

    def keys(self) -> list[bytes]:
        """The blocks that can be found now."""

    def check_integrity(self) -> None:
        """AssertionError where slots and blocks do not add up."""


def payload_view(buffer: memoryview | Frame, *, block_bytes: int) -> memoryview:
    """The block's bytes in a caller's buffer. ValueError where its size is not the tier's."""
    view = buffer.payload if isinstance(buffer, Frame) else memoryview(buffer).cast("B")
    if view.nbytes != block_bytes:
        raise ValueError(f"a block of this tier has {block_bytes} bytes, the buffer {view.nbytes}")
    return view
