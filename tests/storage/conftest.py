"""What the storage tests share: keys, blocks, and a way to wait for handles."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest


def _load(name: str) -> None:
    """Make a file beside this one importable by its name: test folders are no packages."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # disk_weather
_load("store_weather")


class Handle(Protocol):
    @property
    def done(self) -> bool: ...


class Pollable(Protocol):
    def poll(self, timeout_s: float = 0.0) -> Sequence[Handle]: ...


@pytest.fixture
def key_of() -> Callable[[int], bytes]:
    """A 32-byte key for a number."""
    return lambda number: hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


@pytest.fixture
def block_of() -> Callable[..., np.ndarray]:
    """The bytes that belong to a number: uint8 `[num_bytes]`, different for every number."""

    def make(number: int, num_bytes: int = 5000) -> np.ndarray:
        return np.random.default_rng(number).integers(0, 256, num_bytes, dtype=np.uint8)

    return make


@pytest.fixture
def finish() -> Callable[..., None]:
    """Poll until all handles have ended; fails after ten seconds, so that nothing hangs."""

    def wait(pollable: Pollable, *handles: Handle) -> None:
        deadline_s = time.monotonic() + 10
        while not all(handle.done for handle in handles):
            assert time.monotonic() < deadline_s, "a transfer did not end"
            pollable.poll(timeout_s=0.5)

    return wait
