"""The disk tier beside fio, and what a block costs in CPU.

    python benchmarks/tiers_disk.py --folder /path/on/the/disk [--blocks 1400] [--rounds 3]

Each round writes and reads the same number of blocks with fio (io_uring, O_DIRECT) and with `DiskTier`, one after the
other, at the same block size, depth and file system. Shares are the median over rounds of tier rate over fio rate in
the same round. Blocks are written as the tiered store writes them: copied into a frame and summed on the way, then
stored; they are read into frames. `cpu_us_per_block` is all CPU of this process, kernel included, less that copy, which is
the host tier's, or what a plain copy takes where that is less: checksum, headers, bookkeeping, submission and reaping; the
mean of a write and a read, each also given. `fill_us` and `copy_us` are the copy with its sum and a plain copy, `read_us` is
what reading a block from memory once takes one core, a floor for a read. `fio` must be installed.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchllm.kernels.checksum import copy_checksum
from batchllm.kernels.native import library as native_library
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.frame import Frame, Frames, checksum, copy_bytes, frame_stride
from batchllm.storage.tier import Outcome, Transfer


def fio_rates(folder: Path, *, stride: int, num_blocks: int, depth: int) -> tuple[float, float]:
    """(write, read) bytes per second of fio on a fresh file."""
    path = folder / "fio.dat"
    rates = []
    for direction in ("write", "read"):
        command = [
            "fio",
            "--name=tiers",
            f"--filename={path}",
            f"--size={stride * num_blocks}",
            f"--bs={stride}",
            f"--iodepth={depth}",
            "--ioengine=io_uring",
            "--direct=1",
            f"--rw={direction}",
            "--output-format=json",
        ]
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rates.append(float(report["jobs"][0][direction]["bw_bytes"]))
    path.unlink()
    return rates[0], rates[1]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all blocks in one direction: stride bytes per second, CPU seconds per block without the copies."""

    bytes_per_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Floors:
    """CPU seconds of one core a block, in memory that no cache holds: a copy, a copy with its sum, a read."""

    copy_s: float
    fill_s: float
    read_s: float


def memory_floors(buffers: list[Frame], sources: list[memoryview]) -> Floors:
    """Medians over all buffers, which together are larger than the caches."""

    def median_s(work: Callable[[Frame, memoryview], object]) -> float:
        times = []
        for frame, source in zip(buffers, sources, strict=True):
            began_s = time.thread_time()
            work(frame, source)
            times.append(time.thread_time() - began_s)
        return statistics.median(times)

    return Floors(
        copy_s=median_s(lambda frame, source: copy_bytes(source=source, target=frame.payload)),
        fill_s=median_s(lambda frame, source: copy_checksum(source=source, target=frame.payload)),
        read_s=median_s(lambda frame, source: checksum(frame.payload)),
    )


def tier_passes(folder: Path, *, block_bytes: int, num_blocks: int, depth: int) -> tuple[Pass, Pass, Floors, str]:
    """(write, read, floors, backend) of a fresh disk tier."""
    tier = DiskTier(
        folder,
        fingerprint=bytes(32),
        block_bytes=block_bytes,
        num_slots=num_blocks,
        options=DiskOptions(depth=depth),
    )
    frames = Frames(num_frames=2 * depth, block_bytes=block_bytes)
    buffers = [frame for frame in iter(frames.take, None) if frame is not None]
    pool = Frames(num_frames=2 * depth, block_bytes=block_bytes)  # memory like the block pool's
    sources = [frame.payload for frame in iter(pool.take, None) if frame is not None]
    for index, (frame, source) in enumerate(zip(buffers, sources, strict=True)):
        source[:] = bytes([index % 251 + 1]) * block_bytes
        copy_bytes(source=source, target=frame.payload)  # first touch
    keys = [hashlib.blake2b(index.to_bytes(8, "little"), digest_size=32).digest() for index in range(num_blocks)]
    floors = memory_floors(buffers, sources)
    write = run_pass(tier, keys, buffers, sources, most_copy_s=floors.copy_s)
    read = run_pass(tier, keys, buffers, None)
    backend = tier.backend
    tier.close()
    return write, read, floors, backend


def run_pass(
    tier: DiskTier,
    keys: list[bytes],
    buffers: list[Frame],
    sources: list[memoryview] | None,
    *,
    most_copy_s: float = 0.0,
) -> Pass:
    """Move all keys with every buffer in flight: writes of `sources` in turn, or reads where there are none.

    What filling a frame takes does not count up to `most_copy_s` a block.
    """
    idle, waiting, num_done = deque(buffers), deque(enumerate(keys)), 0
    busy: dict[int, tuple[Transfer, Frame]] = {}
    copy_s = 0.0
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    while waiting or busy:
        while idle and waiting:
            frame = idle.popleft()
            index, key = waiting.popleft()
            if sources is None:
                transfer = tier.load(key, frame)
            else:
                copy_began_s = time.thread_time()
                frame.payload_checksum = copy_checksum(source=sources[index % len(sources)], target=frame.payload)
                copy_s += min(time.thread_time() - copy_began_s, most_copy_s)
                transfer = tier.store(key, frame)
            busy[id(transfer)] = (transfer, frame)
        for transfer in tier.poll(timeout_s=10.0):
            idle.append(busy.pop(id(transfer))[1])
            num_done += transfer.outcome is Outcome.DONE
    elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s - copy_s
    if num_done != len(keys):
        sys.exit(f"{len(keys) - num_done} of {len(keys)} blocks did not make it: is the disk full?")
    return Pass(bytes_per_s=num_done * tier.stride / elapsed_s, cpu_s=cpu_s / num_done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--blocks", type=int, default=1400)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    stride = frame_stride(arguments.block_bytes)
    write_shares, read_shares, write_cpu_s, read_cpu_s, backend = [], [], [], [], ""
    all_floors: list[Floors] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        for index in range(arguments.rounds):
            fio = fio_rates(folder, stride=stride, num_blocks=arguments.blocks, depth=arguments.depth)
            write, read, floors, backend = tier_passes(
                folder, block_bytes=arguments.block_bytes, num_blocks=arguments.blocks, depth=arguments.depth
            )
            write_shares.append(write.bytes_per_s / fio[0])
            read_shares.append(read.bytes_per_s / fio[1])
            write_cpu_s.append(write.cpu_s)
            read_cpu_s.append(read.cpu_s)
            all_floors.append(floors)
            print(
                f"round {index}, GB/s: fio writes {fio[0] / 1e9:.2f} reads {fio[1] / 1e9:.2f}, "
                f"tier writes {write.bytes_per_s / 1e9:.2f} reads {read.bytes_per_s / 1e9:.2f}; "
                f"CPU us a block: {write.cpu_s * 1e6:.0f} to write, {read.cpu_s * 1e6:.0f} to read",
                file=sys.stderr,
            )
    cpu_us = [statistics.median(seconds) * 1e6 for seconds in (write_cpu_s, read_cpu_s)]
    result = {
        "fio_share_write": round(statistics.median(write_shares), 3),
        "fio_share_read": round(statistics.median(read_shares), 3),
        "cpu_us_per_block": round(sum(cpu_us) / 2, 1),
        "cpu_us_write": round(cpu_us[0], 1),
        "cpu_us_read": round(cpu_us[1], 1),
        "copy_us": round(statistics.median(floors.copy_s for floors in all_floors) * 1e6, 1),
        "fill_us": round(statistics.median(floors.fill_s for floors in all_floors) * 1e6, 1),
        "read_us": round(statistics.median(floors.read_s for floors in all_floors) * 1e6, 1),
        "stride_bytes": stride,
        "depth": arguments.depth,
        "backend": backend,
        "native": isinstance(native_library.load(), native_library.Library),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
