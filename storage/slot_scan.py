"""The headers of a file's slots, read once before anything else: the index of what earlier runs left."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from batchllm.storage.frame import PAGE_BYTES, Frame, Frames, Header, read_header
from batchllm.storage.submission import Operation, SubmissionQueue

log = logging.getLogger("batchllm.storage")


@dataclass(slots=True, eq=False)
class SlotScan:
    """`headers` holds those that check out, by slot."""

    num_slots: int
    headers: dict[int, Header] = field(default_factory=dict)


def read_headers(scan: SlotScan, submissions: SubmissionQueue, frames: Frames, *, depth: int) -> None:
    """Read every slot's header page into `frames`, `depth` at a time. What cannot be read is a free slot."""
    slots = iter(range(scan.num_slots))
    reading: dict[int, tuple[int, Frame]] = {}
    while True:
        while len(reading) < depth and (frame := frames.take()) is not None:
            slot = next(slots, None)
            if slot is None or not _submit(submissions, slot, frame, offset=PAGE_BYTES + slot * frames.stride):
                frames.give_back(frame)
                break
            reading[slot + 1] = (slot, frame)
        if not reading:
            return
        for completion in submissions.wait():
            slot, frame = reading.pop(completion.tag)
            if completion.result >= PAGE_BYTES and (header := read_header(frame.whole[:PAGE_BYTES])) is not None:
                scan.headers[slot] = header
            frames.give_back(frame)


def _submit(submissions: SubmissionQueue, slot: int, frame: Frame, *, offset: int) -> bool:
    page = frame.whole[:PAGE_BYTES]
    try:
        submissions.submit(Operation(tag=slot + 1, is_write=False, view=page, address=frame.address, offset=offset))
    except OSError as error:
        log.warning("slot %d cannot be read (%s): taken as free", slot, error)
        return False
    return True
