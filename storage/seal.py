"""What makes a frame on disk a block: the header that is written with its bytes, and the proof that is asked of both when they are read."""

from __future__ import annotations

from typing import NamedTuple

from batchllm.storage.frame import (
    PAGE_BYTES,
    CopyChecksum,
    Frame,
    Header,
    checksum,
    copy_checksum,
    read_header,
    write_header,
)
from batchllm.storage.tier import MissCause, payload_view


class Identity(NamedTuple):
    """Which block of which cache: its key, and the fingerprint of the model that made it. A tuple as `Operation` is one."""

    key: bytes
    fingerprint: bytes


def seal(
    frame: Frame,
    data: memoryview | Frame,
    identity: Identity,
    *,
    generation: int,
    written_s: float,
    copy_checksum: CopyChecksum,
) -> None:
    """Fill a frame to be written: `data`, unless that is the frame itself, and the header."""
    payload = frame.payload
    if not isinstance(data, Frame):
        view = payload_view(data, block_bytes=payload.nbytes)
        frame.payload_checksum = copy_checksum(source=view, target=payload)
    known = frame.payload_checksum
    value = checksum(payload) if known is None else known
    header = Header(identity.key, identity.fingerprint, payload.nbytes, value, generation, written_s)
    write_header(frame.whole[:PAGE_BYTES], header)


def unseal(
    frame: Frame, into: memoryview | Frame, identity: Identity, *, copy_checksum: CopyChecksum = copy_checksum
) -> MissCause | None:
    """Why a frame that was read is not the block asked for; None where it is, and lies in `into`, which may be the frame itself."""
    header = read_header(frame.whole[:PAGE_BYTES])
    if header is None or header.payload_bytes != frame.payload.nbytes:
        return MissCause.HEADER
    if header.fingerprint != identity.fingerprint:
        return MissCause.OTHER_MODEL
    if header.key != identity.key:
        return MissCause.OTHER_KEY
    if isinstance(into, Frame):
        value = checksum(frame.payload)
    else:
        # Summed on the way: of damaged bytes the caller is told that they are none.
        view = payload_view(into, block_bytes=frame.payload.nbytes)
        value = copy_checksum(source=frame.payload, target=view)
    return None if value == header.payload_checksum else MissCause.CHECKSUM
