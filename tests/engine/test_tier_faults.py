"""Whatever happens to the tiers during a job, its rows are those of a job without tiers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from disk_weather import Weather, open_in

from batchllm.storage.cache import list_caches
from batchllm.storage.store_file import cache_path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}


@pytest.fixture(scope="module")
def decoder(tier_job: ModuleType) -> Any:
    return tier_job.make_decoder()


@pytest.fixture(scope="module")
def cold(tier_job: ModuleType, decoder: Any) -> dict[int, Any]:
    """The rows of a run in a pool that never gives up a block: tokens and log-probabilities."""
    rows: dict[int, Any] = tier_job.run(decoder, None, num_tokens=4000).rows
    assert len(rows) == 16 and all(row[0] is None for row in rows.values())
    return rows


def test_documents_that_went_through_the_disk_answer_as_if_they_had_not(
    tier_job: ModuleType, decoder: Any, cold: dict[int, Any], tmp_path: Path
) -> None:
    # Host memory holds less than two of the four documents.
    tiers = tier_job.Tiers(host=15, disk=200, folder=tmp_path, open_submissions=open_in(Weather(delay_s=0.02)))
    ran = tier_job.run(decoder, tiers)
    assert ran.rows == cold
    assert ran.restored_tokens > 100 and ran.num_disk_hits > 10 and ran.num_load_misses == 0


@pytest.mark.parametrize("host", [0, 1, 15])
def test_reads_and_writes_that_fail_or_fall_short_cost_time_and_no_row(
    tier_job: ModuleType, decoder: Any, cold: dict[int, Any], tmp_path: Path, host: int
) -> None:
    faults = open_in(Weather(delay_s=0.002, read_errors=0.2, write_errors=0.2, shorten=0.3))
    ran = tier_job.run(decoder, tier_job.Tiers(host=host, disk=200, folder=tmp_path, open_submissions=faults))
    assert ran.rows == cold


@pytest.mark.parametrize("damage", ["delete", "truncate", "overwrite"])
def test_files_damaged_between_steps_are_misses(
    tier_job: ModuleType, decoder: Any, cold: dict[int, Any], tmp_path: Path, damage: str
) -> None:
    def between() -> None:
        for path in tmp_path.iterdir():
            if damage == "delete":
                path.unlink()
            elif damage == "truncate":
                os.truncate(path, 4096)
            else:
                with path.open("r+b") as file:
                    file.write(bytes(path.stat().st_size))

    tiers = tier_job.Tiers(host=2, disk=200, folder=tmp_path, persist=True)
    ran = tier_job.run(decoder, tiers, between=between)
    assert ran.rows == cold
    assert (ran.num_load_misses > 0) == (damage != "delete")


def test_signals_during_spills_interrupt_nothing(
    tier_job: ModuleType, decoder: Any, cold: dict[int, Any], tmp_path: Path
) -> None:
    num_received = 0

    def count(number: int, frame: object) -> None:
        nonlocal num_received
        num_received += 1

    is_over = threading.Event()

    def send() -> None:
        while not is_over.wait(0.005):
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, count)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        ran = tier_job.run(decoder, tier_job.Tiers(host=2, disk=200, folder=tmp_path))
    finally:
        is_over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert ran.rows == cold
    assert num_received > 5 and ran.num_disk_hits > 10


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 200 KB; skips where mounting is refused."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_spill_folder_on_a_small_or_full_file_system_costs_no_row(
    tier_job: ModuleType, decoder: Any, cold: dict[int, Any], small_file_system: Path, is_full: bool
) -> None:
    if is_full:
        with pytest.raises(OSError), (small_file_system / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    ran = tier_job.run(decoder, tier_job.Tiers(host=2, disk=1000, folder=small_file_system))
    assert ran.rows == cold
    assert ran.num_disk_slots < 25
    assert ("no space" if is_full else "room for") in ran.backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 5, 16, 17])
def test_blocks_of_any_size_spill_to_a_disk_and_to_a_file_system_in_memory(
    tier_job: ModuleType, tmp_path: Path, block_size: int, dtype: torch.dtype
) -> None:
    decoder = tier_job.make_decoder(dtype)
    expected = tier_job.run(decoder, None, num_tokens=4000, block_size=block_size).rows
    in_memory = Path("/dev/shm") / f"batchllm-test-{os.getpid()}"
    for folder in (tmp_path, in_memory):
        tiers = tier_job.Tiers(host=1, disk=400, folder=folder)
        ran = tier_job.run(decoder, tiers, num_tokens=150, block_size=block_size)
        assert ran.rows == expected
        assert ran.num_disk_hits > 0
    shutil.rmtree(in_memory)


def test_where_io_uring_is_refused_the_rows_are_the_same_and_the_fallback_is_named(
    cold: dict[int, Any], tmp_path: Path
) -> None:
    command = [sys.executable, str(HERE / "tier_job.py"), str(tmp_path), "refuse", str(errno.EPERM)]
    output = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout
    if output.startswith("no seccomp"):
        pytest.skip("this machine allows no seccomp filter")
    report = json.loads(output)
    assert report["backend"].startswith("threads, ") and "io_uring refused: EPERM" in report["backend"]
    assert report["restored_tokens"] > 0
    assert report["rows"] == json.loads(json.dumps(cold))


def test_what_a_killed_run_had_kept_is_used_and_right(
    tier_job: ModuleType, decoder: Any, cold: dict[int, Any], tmp_path: Path
) -> None:
    command = [sys.executable, str(HERE / "tier_job.py"), str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline_s = time.monotonic() + 60
        while sum(found.num_blocks for found in list_caches(tmp_path)) < 8:
            assert process.poll() is None and time.monotonic() < deadline_s, process.stderr and process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    # A pool for everything: what is restored comes from the killed run.
    ran = tier_job.run(decoder, tier_job.Tiers(host=2, disk=200, folder=tmp_path, persist=True), num_tokens=4000)
    assert ran.rows == cold
    assert ran.restored_tokens >= 8


def test_a_pickle_in_place_of_the_cache_is_neither_loaded_nor_believed(
    tier_job: ModuleType, decoder: Any, cold: dict[int, Any], tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    crafted = b"cos\nsystem\n(S'touch " + os.fsencode(marker) + b"'\ntR."
    block_bytes = 4096
    path = cache_path(tmp_path / "kv", fingerprint=tier_job.ROOT, block_bytes=block_bytes)
    path.parent.mkdir()
    path.write_bytes(crafted + bytes(4096) + crafted * 4096)
    (path.parent / "model.pkl").write_bytes(crafted)
    ran = tier_job.run(decoder, tier_job.Tiers(disk=200, folder=tmp_path / "kv", persist=True), num_tokens=4000)
    assert ran.rows == cold
    assert ran.restored_tokens == 0 and not marker.exists()


def test_a_run_leaves_no_descriptor_and_no_thread_behind(tier_job: ModuleType, decoder: Any, tmp_path: Path) -> None:
    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = state()
    for _ in range(2):
        tier_job.run(decoder, tier_job.Tiers(host=2, disk=200, folder=tmp_path))
    assert state() == before
