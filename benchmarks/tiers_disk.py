"""The disk tier beside fio, and what a block costs in CPU.

    python benchmarks/tiers_disk.py --folder /path/on/the/disk [--blocks 1400] [--rounds 3]

Each round writes and reads the same number of blocks with fio (io_uring, O_DIRECT) and with `DiskTier`, one after the
other, at the same block size, depth and file system. Shares are the median over rounds of tier rate over fio rate in
the same round. CPU is all CPU of this process, kernel included, over all blocks written and read: checksum, headers,
bookkeeping and submission. `fio` must be installed. The last line is one JSON object.
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
from pathlib import Path

from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.frame import Frame, Frames, frame_stride
from batchllm.storage.tier import Outcome


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


def tier_rates(folder: Path, *, block_bytes: int, num_blocks: int, depth: int) -> tuple[float, float, float, str]:
    """(write bytes/s, read bytes/s, CPU seconds per block, backend) of a fresh disk tier, from and into frames in
    memory.
    """
    tier = DiskTier(
        folder,
        fingerprint=bytes(32),
        block_bytes=block_bytes,
        num_slots=num_blocks,
        options=DiskOptions(depth=depth),
    )
    frames = Frames(num_frames=2 * depth, block_bytes=block_bytes)
    buffers = [frame for frame in iter(frames.take, None) if frame is not None]
    for index, frame in enumerate(buffers):
        frame.payload[:] = bytes([index % 251 + 1]) * block_bytes
    keys = [hashlib.blake2b(index.to_bytes(8, "little"), digest_size=32).digest() for index in range(num_blocks)]
    rates = []
    cpu_began_s = time.process_time()
    for is_store in (True, False):
        began_s = time.perf_counter()
        num_done = pump(tier, keys, buffers, is_store=is_store)
        rates.append(num_done * tier.stride / (time.perf_counter() - began_s))
        if num_done != num_blocks:
            sys.exit(f"{num_blocks - num_done} of {num_blocks} blocks did not make it: is the disk full?")
    cpu_s = (time.process_time() - cpu_began_s) / (2 * num_blocks)
    backend = tier.backend
    tier.close()
    return rates[0], rates[1], cpu_s, backend


def pump(tier: DiskTier, keys: list[bytes], buffers: list[Frame], *, is_store: bool) -> int:
    """Move all keys with every buffer in flight; how many ended well."""
    idle, num_done, num_busy = deque(buffers), 0, 0
    waiting = deque(keys)
    busy: dict[int, Frame] = {}
    while waiting or num_busy:
        while idle and waiting:
            frame = idle.popleft()
            key = waiting.popleft()
            busy[id(tier.store(key, frame) if is_store else tier.load(key, frame))] = frame
            num_busy += 1
        for transfer in tier.poll(timeout_s=10.0):
            idle.append(busy.pop(id(transfer)))
            num_busy -= 1
            num_done += transfer.outcome is Outcome.DONE
    return num_done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--blocks", type=int, default=1400)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    stride = frame_stride(arguments.block_bytes)
    shares: list[tuple[float, float]] = []
    cpu: list[float] = []
    backend = ""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        for index in range(arguments.rounds):
            fio = fio_rates(folder, stride=stride, num_blocks=arguments.blocks, depth=arguments.depth)
            write_rate, read_rate, cpu_s, backend = tier_rates(
                folder, block_bytes=arguments.block_bytes, num_blocks=arguments.blocks, depth=arguments.depth
            )
            shares.append((write_rate / fio[0], read_rate / fio[1]))
            cpu.append(cpu_s)
            print(
                f"round {index}: fio {fio[0] / 1e9:.2f} write {fio[1] / 1e9:.2f} read, "
                f"tier {write_rate / 1e9:.2f} write {read_rate / 1e9:.2f} read GB/s, {cpu_s * 1e6:.0f} us CPU a block",
                file=sys.stderr,
            )
    result = {
        "fio_share_write": round(statistics.median(share[0] for share in shares), 3),
        "fio_share_read": round(statistics.median(share[1] for share in shares), 3),
        "cpu_us_per_block": round(statistics.median(cpu) * 1e6, 1),
        "stride_bytes": stride,
        "depth": arguments.depth,
        "backend": backend,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
