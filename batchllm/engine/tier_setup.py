"""Tiers for one run, as its job asks for them: how large, where, under which policy, and what they cost on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchllm.engine.bookkeeping import measure_block_s
from batchllm.engine.sizing import Auto, available_memory_bytes
from batchllm.engine.transfer import TierSetup, choose_by_cost
from batchllm.errors import JobError
from batchllm.kernels.checksum import copy_checksum
from batchllm.storage.cost import CostTable, Decision, Rate, measure_copy, measure_disk
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.errors import StorageError
from batchllm.storage.host import HostTier
from batchllm.storage.keys import KeyScope, root_key
from batchllm.storage.policy import LruPolicy, NextUsePolicy
from batchllm.storage.store import BlockUse, TieredStore
from batchllm.storage.store_file import KeptFile, kept_file

_SPARE_FRAMES = 64
"""Frames for blocks on their way to or from the disk, beside those that the host tier keeps: two deep queues."""

_HOST_SHARE = 0.25
"""Of the memory that is free when the tiers are made, what `host: auto` may take."""

_DISK_SHARE = 0.5
"""Of the free space of the spill folder's file system, what `size: auto` may take."""


@dataclass(frozen=True, slots=True)
class DiskRequest:
    """A disk tier as a job asks for it. `size_bytes` is a cap; `max_age_s` counts for what `persist` keeps."""

    folder: Path
    size_bytes: int | Auto
    max_age_s: float


@dataclass(frozen=True, slots=True)
class TierRequest:
    """The tiers as a job asks for them. `host_bytes` 0: none."""

    host_bytes: int | Auto
    disk: DiskRequest | None
    policy: Literal["next-use", "lru", "recompute"]
    persist: bool


def open_tiers(
    request: TierRequest, *, scope: KeyScope, block_bytes: int, block_size: int, most_blocks: int
) -> TierSetup | None:
    """The store and its costs, measured in about a second; None where the job wants no tier.

    `most_blocks`: all blocks that the batch could ever keep; tiers need no more, unless they are kept. Raises JobError for a spill folder that
    cannot be used, and for more memory than the system gives.
    """
    if request.policy == "recompute" or (request.host_bytes == 0 and request.disk is None):
        return None
    rates = {}
    rates[Rate.COPY_OUT] = rates[Rate.COPY_IN] = measure_copy(block_bytes=block_bytes)
    root = root_key(scope)
    if request.disk is not None:
        _make_folder(request.disk.folder)
        try:
            write, read = measure_disk(request.disk.folder, block_bytes=block_bytes)
        except StorageError as error:
            raise JobError(f"engine.kv.disk: {error}") from None
        # A rate of 0 means that the disk took nothing: without a rate the cost table leaves the tier alone.
        rates |= {rate: value for rate, value in ((Rate.DISK_WRITE, write), (Rate.DISK_READ, read)) if value > 0}
    costs = CostTable(rates, block_s=measure_block_s())
    host = _make_host(request, block_bytes=block_bytes, most_blocks=most_blocks)
    disk = None
    if request.disk is not None:
        # Last, for a disk tier holds a file, its lock and a thread until it is closed.
        try:
            disk = _open_disk(request.disk, request, root=root, block_bytes=block_bytes, most_blocks=most_blocks)
        except StorageError as error:
            raise JobError(f"engine.kv.disk: {error}") from None
    store = TieredStore(
        host=host,
        disk=disk,
        make_policy=LruPolicy if request.policy == "lru" else NextUsePolicy,
        choose=_chooser(costs, block_bytes=block_bytes, recompute_tokens=block_size),
        copy_checksum=copy_checksum,
    )
    return TierSetup(store=store, costs=costs, root=root, persist=request.persist)


def _make_host(request: TierRequest, *, block_bytes: int, most_blocks: int) -> HostTier:
    num_slots = host_slots(request.host_bytes, block_bytes=block_bytes, most_blocks=most_blocks)
    num_slots = min(num_slots, most_blocks)  # slots that the batch cannot fill would only take time to make
    num_spare = _SPARE_FRAMES if request.disk is not None else 0
    try:
        return HostTier(num_slots=num_slots, block_bytes=block_bytes, num_spare=num_spare)
    except (OSError, OverflowError):
        num_bytes = (num_slots + num_spare) * block_bytes
        raise JobError(
            f"engine.kv.host: the system does not give {num_bytes:,} bytes of memory; ask for less"
        ) from None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None


def _unusable(folder: Path, error: OSError) -> JobError:
    return JobError(f"engine.kv.disk.path: {folder}: {os.strerror(error.errno or 0)}")


def _open_disk(disk: DiskRequest, request: TierRequest, *, root: bytes, block_bytes: int, most_blocks: int) -> DiskTier:
    try:
        num_slots = disk_slots(
            disk.size_bytes,
            folder=disk.folder,
            block_bytes=block_bytes,
            most_blocks=most_blocks,
            kept=kept_file(disk.folder, fingerprint=root, block_bytes=block_bytes) if request.persist else None,
        )
    except OSError as error:
        raise _unusable(disk.folder, error) from None
    return DiskTier(
        disk.folder,
        fingerprint=root,
        block_bytes=block_bytes,
        num_slots=num_slots,
        options=DiskOptions(persist=request.persist, max_age_s=disk.max_age_s if request.persist else None),
        copy_checksum=copy_checksum,
    )


def host_slots(host_bytes: int | Auto, *, block_bytes: int, most_blocks: int) -> int:
    """Blocks that a host tier of this size holds."""
    if host_bytes == "auto":
        return min(int(available_memory_bytes() * _HOST_SHARE) // block_bytes, most_blocks)
    return host_bytes // block_bytes


def disk_slots(
    size_bytes: int | Auto, *, folder: Path, block_bytes: int, most_blocks: int, kept: KeptFile | None
) -> int:
    """Blocks that a disk tier of this size in `folder`, which exists, asks for: what the batch can fill. Where blocks are `kept` for other
    batches, all of a size that is named, and of `auto` no fewer than the file has. Raises OSError.
    """
    if size_bytes == "auto":
        kept = kept or KeptFile(0, 0)
        most_bytes = (shutil.disk_usage(folder).free + kept.num_bytes) * _DISK_SHARE
        return min(int(most_bytes) // block_bytes, max(most_blocks, kept.num_slots))
    num_slots = size_bytes // block_bytes
    return min(num_slots, most_blocks) if kept is None else num_slots


def _chooser(costs: CostTable, *, block_bytes: int, recompute_tokens: int) -> Callable[[bytes, BlockUse], Decision]:
    def choose(key: bytes, use: BlockUse) -> Decision:
        return choose_by_cost(costs, block_bytes=block_bytes, recompute_tokens=use.recompute_tokens or recompute_tokens)

    return choose
